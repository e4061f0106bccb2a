//! Getting a caller's thread into a context and out of it by the driver beneath a runtime: the runtime's own way, to
//! choose a device and then the old one again, makes contexts of both.
#![expect(unsafe_code, reason = "calls into the driver")]

use std::ffi::c_int;
use std::ptr;

use super::{DriverTable, Ptr};
use crate::device::DeviceId;
use crate::error::{GpuError, Result};
use crate::interface::Entered;

/// What a driver beneath a runtime has for a thread's contexts.
pub(super) struct ContextCalls {
    state: unsafe extern "C" fn(c_int, *mut u32, *mut c_int) -> c_int,
    retain: unsafe extern "C" fn(*mut Ptr, c_int) -> c_int,
    release: unsafe extern "C" fn(c_int) -> c_int,
    push: unsafe extern "C" fn(Ptr) -> c_int,
    pop: unsafe extern "C" fn(*mut Ptr) -> c_int,
}

impl ContextCalls {
    /// `None`: it lacks one of them.
    pub(super) fn of(driver: &DriverTable) -> Option<Self> {
        Some(Self {
            state: driver.primary_ctx_get_state?,
            retain: driver.primary_ctx_retain?,
            release: driver.primary_ctx_release?,
            push: driver.ctx_push?,
            pop: driver.ctx_pop?,
        })
    }

    /// Whether the process uses the device.
    pub(super) fn is_active(&self, ordinal: u32) -> bool {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: writes two ints, during the call; makes no context.
        let code = unsafe { (self.state)(ordinal as c_int, &raw mut flags, &raw mut active) };
        code == 0 && active != 0
    }

    /// Enters the primary context of a device.
    pub(super) fn enter<'a>(
        self,
        id: DeviceId,
        refused: impl FnOnce(c_int) -> GpuError,
    ) -> Result<Entered<'a>> {
        let (device, mut context) = (id.ordinal as c_int, ptr::null_mut());
        // SAFETY: writes one pointer, during the call.
        let code = unsafe { (self.retain)(&raw mut context, device) };
        if code != 0 {
            return Err(refused(code));
        }
        // SAFETY: the context was retained above, until `leave`.
        let code = unsafe { (self.push)(context) };
        let release = move || {
            // SAFETY: pairs with the retain.
            let _ = unsafe { (self.release)(device) };
        };
        if code != 0 {
            release();
            return Err(refused(code));
        }
        let leave = move || {
            let mut popped = ptr::null_mut();
            // SAFETY: writes one pointer, during the call; pairs with the push.
            let _ = unsafe { (self.pop)(&raw mut popped) };
            release();
        };
        Ok(Entered::new(id, Some(Box::new(leave))))
    }
}
