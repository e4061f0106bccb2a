//! Tensors by DLPack: a structure in a capsule that says where a tensor is and how it lies.
#![expect(unsafe_code, reason = "the structure is one of C")]

use std::ffi::{CStr, c_void};

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::args::unless_exiting;
use crate::face::buffer::{Layout, Memory};
use crate::failure::Failure;

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    dimensions: i32,
    element: Element,
    shape: *const i64,
    /// In elements; null: one after the other.
    strides: *const i64,
    byte_offset: u64,
}

#[repr(C)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct Element {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// What the capsule holds since version 1.0; before, the tensor stood at the beginning.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: *mut c_void,
    flags: u64,
    tensor: Tensor,
}

const READ_ONLY: u64 = 1;
const OLD: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

/// Kinds of devices whose memory the CPU reaches: it, and memory that is pinned for CUDA, for ROCm, or managed.
const HOST: [i32; 4] = [1, 3, 11, 13];
/// CUDA, ROCm, and what has no number of its own (MUSA).
const GPUS: [i32; 3] = [2, 10, 12];

/// The memory of a tensor, which is kept for as long as the capsule is.
pub(crate) fn memory<'py>(object: &Bound<'py, PyAny>) -> Result<Option<Memory<'py>>, Failure> {
    let Some(device) = object.getattr_opt("__dlpack_device__")? else { return Ok(None) };
    let (kind, _): (i32, i32) = device.call0()?.extract()?;
    if !HOST.contains(&kind) && !GPUS.contains(&kind) {
        return Err(Failure::new(format!(
            "a tensor on a device of DLPack's kind {kind} cannot be moved: only the CPU's memory, and that of CUDA, MUSA \
             and HIP devices"
        )));
    }
    let capsule = export(object, !HOST.contains(&kind))?;
    let (tensor, readonly) = look(&capsule)?;
    // SAFETY: the capsule, which is referred to here, owns the structure that `look` has found in it.
    let tensor = unsafe { &*tensor };
    let nbytes = layout(tensor).check(object)?;
    let addr = (tensor.data.expose_provenance() as u64).wrapping_add(tensor.byte_offset);
    Ok(Some(Memory { addr, nbytes, readonly, keep: Some(capsule.into_any()) }))
}

/// Asks for the tensor. The order with work on the device is the caller's (`stream=`), so nothing is waited for.
fn export<'py>(object: &Bound<'py, PyAny>, on_gpu: bool) -> PyResult<Bound<'py, PyCapsule>> {
    let arguments = PyDict::new(object.py());
    if on_gpu {
        arguments.set_item("stream", -1)?;
    }
    let old = arguments.copy()?;
    arguments.set_item("max_version", (1, 0))?;
    let call =
        |arguments: &Bound<'py, PyDict>| object.call_method("__dlpack__", (), Some(arguments));
    let capsule = match call(&arguments) {
        Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => call(&old)?,
        capsule => capsule?,
    };
    Ok(capsule.cast_into()?)
}

/// Where the structure is, and whether it may be written, if that is said.
fn look(capsule: &Bound<'_, PyCapsule>) -> PyResult<(*const Tensor, Option<bool>)> {
    let py = capsule.py();
    if let Some(pointer) = unless_exiting(py, capsule.pointer_checked(Some(VERSIONED)))? {
        let versioned: *const Versioned = pointer.as_ptr().cast_const().cast();
        // SAFETY: a capsule of this name holds a pointer to such a structure, which begins so in every version.
        let major = unsafe { (*versioned).major };
        if major != 1 {
            return Err(PyBufferError::new_err(format!("version {major} of DLPack is not known")));
        }
        // SAFETY: as above; version 1 has all of this structure.
        let versioned = unsafe { &*versioned };
        return Ok((&raw const versioned.tensor, Some(versioned.flags & READ_ONLY != 0)));
    }
    let pointer = capsule.pointer_checked(Some(OLD))?;
    Ok((pointer.as_ptr().cast_const().cast(), None))
}

fn layout(tensor: &Tensor) -> Layout {
    let dimensions = usize::try_from(tensor.dimensions).unwrap_or(0);
    let numbers = |at: *const i64| -> Vec<i64> {
        // SAFETY: where it is not null, there is a number for each dimension, by the structure's definition.
        unsafe { std::slice::from_raw_parts(at, dimensions) }.to_vec()
    };
    let item = (u64::from(tensor.element.bits) * u64::from(tensor.element.lanes)).div_ceil(8);
    let shape = if tensor.shape.is_null() { Vec::new() } else { numbers(tensor.shape) };
    let strides = (!tensor.strides.is_null()).then(|| numbers(tensor.strides));
    Layout {
        shape: shape.into_iter().map(|n| u64::try_from(n).unwrap_or(0)).collect(),
        strides: strides
            .map(|strides| strides.into_iter().map(|n| n.saturating_mul(item as i64)).collect()),
        item,
    }
}
