//! What memory a Python object lends: its address, its length, whether it may be written, and what keeps it there.
#![expect(
    unsafe_code,
    reason = "asks what a type can do, where there is no safe form of the question"
)]

use pyo3::Borrowed;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyException, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyMemoryView, PyString, PyTuple};

use crate::args::{Int, unless_exiting};
use crate::face::dlpack;
use crate::failure::Failure;

/// A range of memory, and what keeps it there: nothing, if it was given as an address.
pub(crate) struct Memory<'py> {
    pub(crate) addr: u64,
    pub(crate) nbytes: u64,
    /// `None`: nobody said.
    pub(crate) readonly: Option<bool>,
    pub(crate) keep: Option<Bound<'py, PyAny>>,
}

/// What a caller gives for a range.
pub(crate) enum Given<'py> {
    /// The address, with no length.
    Address(u64),
    Memory(Memory<'py>),
}

/// How the elements of an array lie: all there is to know about whether they are one range.
pub(crate) struct Layout {
    pub(crate) shape: Vec<u64>,
    /// In bytes; `None`: one after the other, the last index fastest.
    pub(crate) strides: Option<Vec<i64>>,
    pub(crate) item: u64,
}

impl<'py> Given<'py> {
    pub(crate) fn of(object: &Bound<'py, PyAny>) -> Result<Self, Failure> {
        if object.is_exact_instance_of::<PyInt>() {
            return Ok(Self::Address(object.extract::<Int>()?.0));
        }
        if let Ok(pair) = object.cast::<PyTuple>() {
            let (Int(addr), Int(nbytes)) = pair.extract().map_err(|error: PyErr| {
                if !error.is_instance_of::<PyException>(object.py()) {
                    return error;
                }
                expected("expected (address, length) in bytes", object, Some(error))
            })?;
            return Ok(Self::Memory(Memory { addr, nbytes, readonly: None, keep: None }));
        }
        if has_buffer(object) {
            return buffer(object);
        }
        if let Some(memory) = device_array(object)? {
            return Ok(Self::Memory(memory));
        }
        if has_index(object) {
            return Ok(Self::Address(object.extract::<Int>()?.0));
        }
        Err(expected("expected an object with a buffer, an array, or an address", object, None)
            .into())
    }

    /// The memory; an address alone is not enough.
    pub(crate) fn memory(self) -> Result<Memory<'py>, Failure> {
        match self {
            Self::Memory(memory) => Ok(memory),
            Self::Address(addr) => Err(PyTypeError::new_err(format!(
                "an address alone ({addr:#x}) says no length; pass (address, length), or the object whose memory it is"
            ))
            .into()),
        }
    }
}

fn expected(what: &str, object: &Bound<'_, PyAny>, cause: Option<PyErr>) -> PyErr {
    let error = PyTypeError::new_err(format!("{what}, not {}", name(object)));
    error.set_cause(object.py(), cause);
    error
}

fn name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "this".to_owned(), |name| name.to_string())
}

/// By the buffer protocol. The view that is kept also keeps a `bytearray` from being resized.
fn buffer<'py>(object: &Bound<'py, PyAny>) -> Result<Given<'py>, Failure> {
    let view = match PyMemoryView::from(object) {
        Ok(view) => view,
        // Arrays of a type that the protocol has no format for (numpy's dates).
        Err(error) => {
            return match interface(object, "__array_interface__")? {
                Some(memory) => Ok(Given::Memory(memory)),
                None => Err(error.into()),
            };
        }
    };
    let view = if view.getattr("ndim")?.extract::<usize>()? > 0 {
        view
    } else if has_index(object) && view.getattr("readonly")?.is_truthy()? {
        // A number of numpy's.
        return Ok(Given::Address(object.extract::<Int>()?.0));
    } else {
        // What has no dimension has no shape, which the binding expects.
        view.call_method1("cast", ("B",))?.cast_into::<PyMemoryView>().map_err(PyErr::from)?
    };
    let raw = PyUntypedBuffer::get(&view)?;
    if has_objects(raw.format().to_bytes()) {
        return Err(objects(object));
    }
    if !(raw.is_c_contiguous() || raw.is_fortran_contiguous()) {
        let layout = Layout {
            shape: raw.shape().iter().map(|&n| n as u64).collect(),
            strides: Some(raw.strides().iter().map(|&n| n as i64).collect()),
            item: raw.item_size() as u64,
        };
        return Err(layout.not_one_range(object));
    }
    let (addr, nbytes) = (raw.buf_ptr().expose_provenance() as u64, raw.len_bytes() as u64);
    let readonly = Some(raw.readonly());
    raw.release(object.py());
    Ok(Given::Memory(Memory { addr, nbytes, readonly, keep: Some(view.into_any()) }))
}

/// Whether a format has Python objects in it. Names of fields, which stand between colons, may have any letters.
fn has_objects(format: &[u8]) -> bool {
    format.contains(&b'O')
        && format.split(|&c| c == b':').step_by(2).any(|types| types.contains(&b'O'))
}

/// Their bytes are addresses of this process: what is read over them, the interpreter follows.
fn objects(object: &Bound<'_, PyAny>) -> Failure {
    Failure::new(format!(
        "the elements of {} are Python objects, whose bytes mean nothing elsewhere; pass an array of numbers, or what \
         pickle makes of them",
        name(object)
    ))
}

/// By what arrays of GPU frameworks have.
fn device_array<'py>(object: &Bound<'py, PyAny>) -> Result<Option<Memory<'py>>, Failure> {
    // Tensors have the first one wherever they are, and it fails for those that it cannot describe.
    let by_interface = interface(object, "__cuda_array_interface__");
    match by_interface {
        Ok(Some(memory)) => return Ok(Some(memory)),
        Ok(None) => {}
        Err(Failure::Raised(error)) => {
            unless_exiting::<()>(object.py(), Err(error))?;
        }
        Err(failure) => return Err(failure),
    }
    dlpack::memory(object)
}

/// By an attribute that describes an array: `__cuda_array_interface__`, or numpy's `__array_interface__`.
fn interface<'py>(
    object: &Bound<'py, PyAny>,
    attribute: &str,
) -> Result<Option<Memory<'py>>, Failure> {
    let Some(interface) = object.getattr_opt(attribute)? else { return Ok(None) };
    let interface = interface.cast_into::<PyDict>().map_err(PyErr::from)?;
    let get = |key: &str| -> PyResult<Bound<'py, PyAny>> {
        interface.get_item(key)?.ok_or_else(|| {
            PyTypeError::new_err(format!("{attribute} of {} has no {key:?}", name(object)))
        })
    };
    let strides = interface.get_item("strides")?.filter(|strides| !strides.is_none());
    let typestr = get("typestr")?;
    let typestr = typestr.cast::<PyString>().map_err(PyErr::from)?.to_str()?;
    // "<M8[ns]" has a unit behind its digits.
    let digits = typestr.get(2..).and_then(|rest| rest.split('[').next());
    let Some(item) = digits.and_then(|digits| digits.parse::<u64>().ok()) else {
        let said = format!("{attribute} of {}: {typestr:?} is no element type", name(object));
        return Err(PyTypeError::new_err(said).into());
    };
    if typestr.as_bytes()[1] == b'O' {
        return Err(objects(object));
    }
    let layout = Layout {
        shape: get("shape")?.extract::<Vec<u64>>()?,
        strides: strides.map(|strides| strides.extract::<Vec<i64>>()).transpose()?,
        // Characters of numpy's texts have four bytes.
        item: if typestr.as_bytes()[1] == b'U' { item.saturating_mul(4) } else { item },
    };
    let (Int(addr), readonly) = get("data")?.extract::<(Int, bool)>()?;
    let nbytes = layout.check(object)?;
    let keep = Some(object.clone());
    Ok(Some(Memory { addr, nbytes, readonly: Some(readonly), keep }))
}

impl Layout {
    /// How many bytes the elements have; refuses those that do not lie side by side.
    pub(crate) fn check(&self, object: &Bound<'_, PyAny>) -> Result<u64, Failure> {
        let Self { shape, strides, item } = self;
        let bytes = shape.iter().try_fold(*item, |product, n| product.checked_mul(*n));
        let Some(bytes) = bytes else {
            let name = name(object);
            return Err(Failure::new(format!(
                "{name} of shape {} is beyond any memory",
                tuple(shape)
            )));
        };
        let Some(strides) = strides else { return Ok(bytes) };
        let outer_first = shape.iter().zip(strides);
        let one_range = strides.len() == shape.len()
            && (bytes == 0
                || side_by_side(outer_first.clone().rev(), *item)
                || side_by_side(outer_first, *item));
        if one_range { Ok(bytes) } else { Err(self.not_one_range(object)) }
    }

    fn not_one_range(&self, object: &Bound<'_, PyAny>) -> Failure {
        Failure::new(format!(
            "{} of shape {} with strides {} bytes is not contiguous, so it is not one range of memory; pass a \
             contiguous copy, or one range for each part that is contiguous",
            name(object),
            tuple(&self.shape),
            tuple(self.strides.as_deref().unwrap_or_default()),
        ))
    }
}

/// Whether each dimension, the one with the smallest stride first, begins where the one before it ends.
fn side_by_side<'a>(dimensions: impl Iterator<Item = (&'a u64, &'a i64)>, item: u64) -> bool {
    let mut next = item;
    for (&n, &stride) in dimensions {
        // The stride of a dimension with one element says nothing.
        if n != 1 && u64::try_from(stride) != Ok(next) {
            return false;
        }
        next = next.saturating_mul(n);
    }
    true
}

/// As Python writes tuples.
fn tuple<T: ToString>(numbers: &[T]) -> String {
    let texts: Vec<String> = numbers.iter().map(T::to_string).collect();
    format!("({}{})", texts.join(", "), if texts.len() == 1 { "," } else { "" })
}

/// Whether it offers the buffer protocol.
fn has_buffer(object: &Bound<'_, PyAny>) -> bool {
    // SAFETY: `object` is a live Python object, and this thread is attached, which its lifetime proves; the function
    // only looks at the object's type.
    unsafe { pyo3::ffi::PyObject_CheckBuffer(object.as_ptr()) == 1 }
}

/// Whether it can stand for an integer.
pub(crate) fn has_index(object: &Bound<'_, PyAny>) -> bool {
    let object: Borrowed<'_, '_, PyAny> = object.as_borrowed();
    // SAFETY: as above.
    unsafe { pyo3::ffi::PyIndex_Check(object.as_ptr()) == 1 }
}
