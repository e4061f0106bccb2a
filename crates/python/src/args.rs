//! Arguments: what Python callers pass, as numbers and texts.
//!
//! Existing programs pass Python's and numpy's integers, lists, tuples and arrays of them, `str` and
//! `bytes`. Everything else, and every number out of range, is a `TypeError`, as with existing engines.

use pyo3::Borrowed;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyUnicodeDecodeError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyString, PyTuple};

/// An integer from 0 to 2**64 - 1, from anything with `__index__`.
#[derive(Clone, Copy)]
pub(crate) struct Int(pub(crate) u64);

/// Such integers, from any sequence of them.
pub(crate) struct Ints(pub(crate) Vec<u64>);

/// Text, from `str` or from `bytes` in UTF-8.
#[derive(Default)]
pub(crate) struct Text(pub(crate) String);

/// The bytes of `bytes`, a buffer, or a `str` in UTF-8.
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl FromPyObject<'_, '_> for Int {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        integer(object).map(Self)
    }
}

impl FromPyObject<'_, '_> for Ints {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        if let Ok(list) = object.cast::<PyList>() {
            return items(list.len(), list.iter()).map(Self);
        }
        if let Ok(tuple) = object.cast::<PyTuple>() {
            return items(tuple.len(), tuple.iter()).map(Self);
        }
        if is_text(object) || !is_sequence(object) {
            let what = type_name(object);
            return Err(PyTypeError::new_err(format!(
                "expected a sequence of integers, not {what}"
            )));
        }
        if let Some(numbers) = array(object)? {
            return Ok(Self(numbers));
        }
        let len = object.len()?;
        let mut numbers = Vec::new();
        for at in 0..len {
            numbers.push(item(at, object.get_item(at)?)?);
        }
        Ok(Self(numbers))
    }
}

impl FromPyObject<'_, '_> for Text {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        if let Ok(text) = object.cast::<PyString>() {
            return Ok(Self(text.to_str()?.to_owned()));
        }
        let Ok(bytes) = object.cast::<PyBytes>() else {
            let what = type_name(object);
            return Err(PyTypeError::new_err(format!("expected str or bytes, not {what}")));
        };
        match std::str::from_utf8(bytes.as_bytes()) {
            Ok(text) => Ok(Self(text.to_owned())),
            Err(e) => {
                Err(PyUnicodeDecodeError::new_err_from_utf8(object.py(), bytes.as_bytes(), e))
            }
        }
    }
}

impl FromPyObject<'_, '_> for Bytes {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        if let Ok(bytes) = object.cast::<PyBytes>() {
            return Ok(Self(bytes.as_bytes().to_vec()));
        }
        if let Ok(text) = object.cast::<PyString>() {
            return Ok(Self(text.to_str()?.as_bytes().to_vec()));
        }
        let Ok(buffer) = PyUntypedBuffer::get(&object.to_owned()) else {
            let what = type_name(object);
            return Err(PyTypeError::new_err(format!("expected bytes or a buffer, not {what}")));
        };
        drop(buffer);
        // `bytes(view)` flattens a buffer of any shape and format.
        let view = pyo3::types::PyMemoryView::from(&object.to_owned())?;
        let bytes = view.call_method0("tobytes")?;
        Ok(Self(bytes.cast::<PyBytes>()?.as_bytes().to_vec()))
    }
}

fn integer(object: Borrowed<'_, '_, PyAny>) -> PyResult<u64> {
    object.extract::<u64>().map_err(|error| not_an_integer(object, error))
}

/// What is wrong with `object`; an exception that its own `__index__` raised stays what it is.
#[cold]
fn not_an_integer(object: Borrowed<'_, '_, PyAny>, error: PyErr) -> PyErr {
    let py = object.py();
    if error.is_instance_of::<PyOverflowError>(py) {
        let value = object.str().map_or_else(|_| "this".to_owned(), |text| text.to_string());
        return PyTypeError::new_err(format!(
            "expected an integer from 0 to 2**64 - 1, not {value}"
        ));
    }
    if error.is_instance_of::<PyTypeError>(py) {
        let what = type_name(object);
        return PyTypeError::new_err(format!("expected an integer, not {what}"));
    }
    error
}

fn items<'py>(len: usize, objects: impl Iterator<Item = Bound<'py, PyAny>>) -> PyResult<Vec<u64>> {
    let mut numbers = Vec::with_capacity(len);
    for (at, object) in objects.enumerate() {
        numbers.push(item(at, object)?);
    }
    Ok(numbers)
}

fn item(at: usize, object: Bound<'_, PyAny>) -> PyResult<u64> {
    integer(object.as_borrowed()).map_err(|error| {
        if error.is_instance_of::<PyTypeError>(object.py()) {
            let text = error.value(object.py()).to_string();
            PyTypeError::new_err(format!("item {at}: {text}"))
        } else {
            error
        }
    })
}

/// The numbers of a one-dimensional array of 8-byte integers; `None` if it is not one.
fn array(object: Borrowed<'_, '_, PyAny>) -> PyResult<Option<Vec<u64>>> {
    let py = object.py();
    let Ok(buffer) = PyUntypedBuffer::get(&object.to_owned()) else { return Ok(None) };
    // The binding takes bytes of the other order for its own; those are read one by one.
    let foreign = buffer.format().to_bytes().starts_with(OTHER_ORDER);
    if buffer.dimensions() != 1 || foreign {
        return Ok(None);
    }
    if let Ok(buffer) = buffer.as_typed::<u64>() {
        return buffer.to_vec(py).map(Some);
    }
    let Ok(buffer) = buffer.as_typed::<i64>() else { return Ok(None) };
    let not_negative = |(at, n): (usize, i64)| {
        u64::try_from(n).map_err(|_| {
            PyTypeError::new_err(format!(
                "item {at}: expected an integer from 0 to 2**64 - 1, not {n}"
            ))
        })
    };
    buffer.to_vec(py)?.into_iter().enumerate().map(not_negative).collect::<PyResult<_>>().map(Some)
}

/// How the format of a buffer starts whose integers have their bytes in the other order.
const OTHER_ORDER: &[u8] = if cfg!(target_endian = "little") { b">" } else { b"<" };

/// Text is a sequence, too, but nobody means it as one.
fn is_text(object: Borrowed<'_, '_, PyAny>) -> bool {
    object.is_instance_of::<PyString>()
        || object.is_instance_of::<PyBytes>()
        || object.is_instance_of::<PyByteArray>()
}

/// What Python's own C code takes for a sequence; arrays are, though they are no
/// `collections.abc.Sequence`.
#[expect(unsafe_code, reason = "there is no safe form of this question")]
fn is_sequence(object: Borrowed<'_, '_, PyAny>) -> bool {
    // SAFETY: `object` is a live Python object for the whole call, and this thread is attached, which
    // its lifetimes prove; the function only looks at the object's type.
    unsafe { pyo3::ffi::PySequence_Check(object.as_ptr()) == 1 }
}

fn type_name(object: Borrowed<'_, '_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "this".to_owned(), |name| name.to_string())
}
