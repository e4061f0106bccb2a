//! Arguments: what Python callers pass, as numbers and texts.
//!
//! Existing programs pass Python's and numpy's integers, lists, tuples and arrays of them, `str` and
//! `bytes`. Everything else, and every number out of range, is a `TypeError`, as with existing engines.
//!
//! Lists and data can be longer than memory (a range, an array that repeats one number), so they are
//! looked at first and copied when all else about the call is known to be right.

use pyo3::Borrowed;
use pyo3::buffer::{Element, ElementType, PyBuffer, PyUntypedBuffer};
use pyo3::exceptions::{
    PyException, PyMemoryError, PyOverflowError, PyTypeError, PyUnicodeDecodeError, PyValueError,
};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyMemoryView, PySlice, PyString, PyTuple};

use crate::failure::Failure;

/// An integer from 0 to 2**64 - 1, from anything with `__index__`.
#[derive(Clone, Copy, Default)]
pub(crate) struct Int(pub(crate) u64);

/// Such integers, in any sequence of them: looked at, not copied yet.
pub(crate) enum Ints<'py> {
    List(Bound<'py, PyList>),
    Tuple(Bound<'py, PyTuple>),
    Unsigned(PyBuffer<u64>),
    Signed(PyBuffer<i64>),
    /// Anything else, and what it says its length is.
    Other(Bound<'py, PyAny>, usize),
}

/// The most entries of a list: as many requests as a batch holds.
pub(crate) const MOST_ENTRIES: usize = u32::MAX as usize;
/// So many entries are read between two looks for signals: a few milliseconds.
const STRETCH: usize = 1 << 16;

/// A name or an address: text, from `str` or from `bytes` in UTF-8.
#[derive(Default)]
pub(crate) struct Text(pub(crate) String);

/// Text of any length.
#[derive(Default)]
pub(crate) struct Message(pub(crate) String);

/// No host, server or location has a longer name. It is copied into errors and logs.
const LONGEST_NAME: usize = 64 << 10;

/// The bytes of `bytes`, a buffer, or a `str` in UTF-8: looked at, not copied yet.
pub(crate) enum Data<'py> {
    Bytes(Bound<'py, PyBytes>),
    View(Bound<'py, PyMemoryView>),
}

impl FromPyObject<'_, '_> for Int {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        integer(object).map(Self)
    }
}

impl<'py> FromPyObject<'_, 'py> for Ints<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(list) = object.cast::<PyList>() {
            return Ok(Self::List(list.to_owned()));
        }
        if let Ok(tuple) = object.cast::<PyTuple>() {
            return Ok(Self::Tuple(tuple.to_owned()));
        }
        if is_text(object) || !is_sequence(object) {
            let what = type_name(object);
            return Err(PyTypeError::new_err(format!(
                "expected a sequence of integers, not {what}"
            )));
        }
        if let Some(numbers) = array(object)? {
            return Ok(numbers);
        }
        let len = match object.len() {
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => usize::MAX,
            len => len?,
        };
        Ok(Self::Other(object.to_owned(), len))
    }
}

impl Ints<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::List(list) => list.len(),
            Self::Tuple(tuple) => tuple.len(),
            Self::Unsigned(numbers) => numbers.item_count(),
            Self::Signed(numbers) => numbers.item_count(),
            Self::Other(_, len) => *len,
        }
    }

    /// The integers of the argument called `name`.
    pub(crate) fn read(&self, py: Python<'_>, name: &str) -> Result<Vec<u64>, Failure> {
        let len = self.len();
        if len > MOST_ENTRIES {
            return Err(Failure::new(format!(
                "{name} has more than 2^32 - 1 entries; pass several shorter lists"
            )));
        }
        let read = match self {
            Self::List(list) => items(py, len, list.iter().map(Ok)),
            Self::Tuple(tuple) => items(py, len, tuple.iter().map(Ok)),
            Self::Unsigned(numbers) => copied(py, numbers),
            Self::Signed(numbers) => copied(py, numbers).and_then(not_negative),
            Self::Other(object, _) => items(py, len, (0..len).map(|at| object.get_item(at))),
        };
        match read {
            Ok(numbers) if numbers.len() == len => Ok(numbers),
            Ok(_) => Err(Failure::new(format!("{name} became shorter while it was read"))),
            Err(error) if error.is_instance_of::<PyTypeError>(py) => {
                // As the binding says it of other arguments.
                error
                    .value(py)
                    .call_method1("add_note", (format!("while processing '{name}'"),))?;
                Err(error.into())
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// An empty vector with room for `len` entries; where there is no memory, an exception and not the end of
/// the process.
pub(crate) fn room<T>(len: usize) -> PyResult<Vec<T>> {
    let mut room = Vec::new();
    room.try_reserve_exact(len).map_err(|_| no_memory::<T>(len))?;
    Ok(room)
}

fn no_memory<T>(len: usize) -> PyErr {
    PyMemoryError::new_err(format!("no memory for {len} entries of {} bytes", size_of::<T>()))
}

impl FromPyObject<'_, '_> for Text {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        text(object, LONGEST_NAME).map(Self)
    }
}

impl FromPyObject<'_, '_> for Message {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        text(object, usize::MAX).map(Self)
    }
}

fn text(object: Borrowed<'_, '_, PyAny>, longest: usize) -> PyResult<String> {
    let fitting = |text: &str| {
        if text.len() > longest {
            let len = text.len();
            return Err(PyValueError::new_err(format!(
                "expected a name, not a text of {len} bytes"
            )));
        }
        owned(text)
    };
    if let Ok(text) = object.cast::<PyString>() {
        return fitting(text.to_str()?);
    }
    let Ok(bytes) = object.cast::<PyBytes>() else {
        let what = type_name(object);
        return Err(PyTypeError::new_err(format!("expected str or bytes, not {what}")));
    };
    match std::str::from_utf8(bytes.as_bytes()) {
        Ok(text) => fitting(text),
        Err(e) => Err(PyUnicodeDecodeError::new_err_from_utf8(object.py(), bytes.as_bytes(), e)),
    }
}

/// A copy of `text`; where there is no memory, an exception.
pub(crate) fn owned(text: &str) -> PyResult<String> {
    let mut owned = String::new();
    owned.try_reserve_exact(text.len()).map_err(|_| no_memory::<u8>(text.len()))?;
    owned.push_str(text);
    Ok(owned)
}

impl<'py> FromPyObject<'_, 'py> for Data<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(bytes) = object.cast::<PyBytes>() {
            return Ok(Self::Bytes(bytes.to_owned()));
        }
        if let Ok(text) = object.cast::<PyString>() {
            return text.encode_utf8().map(Self::Bytes);
        }
        let Some(view) = unless_exiting(object.py(), PyMemoryView::from(&object))? else {
            let what = type_name(object);
            return Err(PyTypeError::new_err(format!("expected bytes or a buffer, not {what}")));
        };
        Ok(Self::View(view))
    }
}

impl<'py> Data<'py> {
    pub(crate) fn len(&self) -> PyResult<u64> {
        match self {
            Self::Bytes(bytes) => Ok(bytes.as_bytes().len() as u64),
            Self::View(view) => view.getattr("nbytes")?.extract(),
        }
    }

    /// Its first `len` bytes, which it has, or more of them.
    pub(crate) fn first(self, len: usize) -> PyResult<Bound<'py, PyBytes>> {
        let view = match self {
            Self::Bytes(bytes) => return Ok(bytes),
            Self::View(view) => view,
        };
        // Copied, since whoever owns the buffer can change it meanwhile. `tobytes` flattens any shape and
        // format; only those that are flat already can be cut before.
        let py = view.py();
        let flat = unless_exiting(py, view.call_method1("cast", ("B",)))?;
        let first = match flat {
            Some(flat) => flat.get_item(PySlice::new(py, 0, len as isize, 1))?,
            None => view.into_any(),
        };
        Ok(first.call_method0("tobytes")?.cast_into()?)
    }
}

/// `None` for an error, but not for one that wants out of the program, such as Ctrl-C.
pub(crate) fn unless_exiting<T>(py: Python<'_>, result: PyResult<T>) -> PyResult<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_instance_of::<PyException>(py) => Ok(None),
        Err(error) => Err(error),
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
        // The text of a very long number takes very long to make.
        let small = object.extract::<i64>().map(i128::from);
        let value = match unless_exiting(py, small.or_else(|_| object.extract::<i128>())) {
            Ok(Some(value)) => value.to_string(),
            Ok(None) => "one so far from them".to_owned(),
            Err(exit) => return exit,
        };
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

/// The integers among `objects`, of which there are at most `len`, or so it was said.
fn items<'py>(
    py: Python<'py>,
    len: usize,
    objects: impl Iterator<Item = PyResult<Bound<'py, PyAny>>>,
) -> PyResult<Vec<u64>> {
    let mut numbers = room(len.min(STRETCH))?;
    for (at, object) in objects.enumerate() {
        if numbers.len() == numbers.capacity() {
            numbers.try_reserve(1).map_err(|_| no_memory::<u64>(len))?;
        }
        if at % STRETCH == STRETCH - 1 {
            // A turn for other threads.
            py.detach(|| {});
            py.check_signals()?;
        }
        numbers.push(item(at, object?)?);
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

/// The numbers of a one-dimensional array of 8-byte integers; `None` if they have to be read one by one.
fn array<'py>(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Option<Ints<'py>>> {
    let Some(buffer) = unless_exiting(object.py(), PyUntypedBuffer::get(&object))? else {
        return Ok(None);
    };
    let element = ElementType::from_format(buffer.format());
    if buffer.dimensions() != 1 || matches!(element, ElementType::Float { .. }) {
        let what = type_name(object);
        let (dimensions, format) = (buffer.dimensions(), buffer.format().to_string_lossy());
        return Err(PyTypeError::new_err(format!(
            "expected a sequence of integers, not {what} of format '{format}' with {dimensions} dimensions"
        )));
    }
    // The binding takes bytes of the other order for its own.
    if buffer.format().to_bytes().starts_with(OTHER_ORDER) {
        return Ok(None);
    }
    if buffer.as_typed::<u64>().is_ok() {
        return buffer.into_typed().map(|numbers| Some(Ints::Unsigned(numbers)));
    }
    if buffer.as_typed::<i64>().is_ok() {
        return buffer.into_typed().map(|numbers| Some(Ints::Signed(numbers)));
    }
    Ok(None)
}

fn copied<T: Element + Copy + Default>(py: Python<'_>, buffer: &PyBuffer<T>) -> PyResult<Vec<T>> {
    let len = buffer.item_count();
    let mut numbers = room(len)?;
    numbers.resize(len, T::default());
    buffer.copy_to_slice(py, &mut numbers)?;
    Ok(numbers)
}

fn not_negative(numbers: Vec<i64>) -> PyResult<Vec<u64>> {
    match numbers.iter().enumerate().find(|&(_, &n)| n < 0) {
        // In place: the two have the same layout.
        None => Ok(numbers.into_iter().map(i64::cast_unsigned).collect()),
        Some((at, n)) => Err(PyTypeError::new_err(format!(
            "item {at}: expected an integer from 0 to 2**64 - 1, not {n}"
        ))),
    }
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
