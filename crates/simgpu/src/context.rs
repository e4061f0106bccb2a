//! Contexts, and which of them is current on the calling thread.

use crate::code::{CONTEXT_DESTROYED, Done, INVALID_CONTEXT, INVALID_DEVICE};
use crate::core::{Context, Core, State, variant};
use crate::variant::{Family, Variant};

impl State {
    pub(crate) fn device(&self, ordinal: i32) -> Result<usize, i32> {
        let index = usize::try_from(ordinal).map_err(|_| INVALID_DEVICE)?;
        if index < self.devices.len() { Ok(index) } else { Err(INVALID_DEVICE) }
    }

    pub(crate) fn create_context(&mut self, device: usize) -> u64 {
        let handle = self.handle();
        self.contexts.insert(handle, Context { device, alive: true, legacy_stream: 0 });
        self.devices[device].contexts += 1;
        self.devices[device].contexts_created += 1;
        handle
    }

    pub(crate) fn destroy_context(&mut self, handle: u64) -> Done {
        let context = self.contexts.get_mut(&handle).filter(|context| context.alive);
        let context = context.ok_or(INVALID_CONTEXT)?;
        context.alive = false;
        context.legacy_stream = 0;
        let device = context.device;
        self.devices[device].contexts -= 1;
        for stream in self.streams.values_mut().filter(|stream| stream.context == handle) {
            stream.close();
        }
        Ok(())
    }

    pub(crate) fn retain_primary(&mut self, device: usize) -> u64 {
        let known = self.devices[device].primary;
        self.devices[device].retained += 1;
        if known == 0 {
            let made = self.create_context(device);
            self.devices[device].primary = made;
            return made;
        }
        if let Some(context) = self.contexts.get_mut(&known).filter(|context| !context.alive) {
            context.alive = true;
            self.devices[device].contexts += 1;
            self.devices[device].contexts_created += 1;
        }
        known
    }

    pub(crate) fn release_primary(&mut self, device: usize) -> Done {
        let entry = &mut self.devices[device];
        entry.retained = entry.retained.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        let (left, primary) = (entry.retained, entry.primary);
        if left == 0 { self.destroy_context(primary) } else { Ok(()) }
    }

    pub(crate) fn primary_is_active(&self, device: usize) -> bool {
        self.devices[device].retained > 0
    }

    /// A context that can be used.
    pub(crate) fn living(&self, handle: u64) -> Result<&Context, i32> {
        let context = self.contexts.get(&handle).ok_or(INVALID_CONTEXT)?;
        if context.alive { Ok(context) } else { Err(CONTEXT_DESTROYED) }
    }

    /// The current context and its device, as the driver sees it: there may be none.
    pub(crate) fn current(&self, core: &Core) -> Result<(u64, usize), i32> {
        let handle = core.thread(|thread| thread.contexts.last().copied());
        let handle = handle.ok_or(INVALID_CONTEXT)?;
        Ok((handle, self.living(handle)?.device))
    }

    /// The current context as a runtime sees it: it makes one, on device 0 if nothing was said.
    pub(crate) fn current_or_made(&mut self, core: &Core) -> Result<(u64, usize), i32> {
        let handle = core.thread(|thread| thread.contexts.last().copied());
        if let Some(context) = handle.and_then(|handle| self.contexts.get(&handle))
            && context.alive
        {
            return Ok((handle.unwrap_or_default(), context.device));
        }
        let device = core.thread(|thread| thread.device).unwrap_or(0);
        Ok((self.bind(core, device), device))
    }

    /// Makes the primary context of `device` current, and makes it at all if it must.
    fn bind(&mut self, core: &Core, device: usize) -> u64 {
        let handle = if self.devices[device].held_by_runtime {
            self.devices[device].primary
        } else {
            self.devices[device].held_by_runtime = true;
            self.retain_primary(device)
        };
        core.thread(|thread| {
            thread.contexts.pop();
            thread.contexts.push(handle);
        });
        handle
    }

    /// `SetDevice`. From CUDA 12 on it creates the context at once.
    pub(crate) fn set_device(&mut self, core: &Core, ordinal: i32) -> Done {
        let device = self.device(ordinal)?;
        core.thread(|thread| thread.device = Some(device));
        let at_once = match variant().family() {
            Family::Cuda => variant() != Variant::CudaRuntime11,
            Family::Musa => true,
            Family::Hip => false,
        };
        if at_once || self.devices[device].held_by_runtime {
            self.bind(core, device);
        } else {
            // Made when it is needed; until then the old one must not be used by mistake.
            core.thread(|thread| thread.contexts.pop());
        }
        Ok(())
    }

    /// `GetDevice`, which makes no context.
    pub(crate) fn chosen_device(&self, core: &Core) -> usize {
        let (current, device) =
            core.thread(|thread| (thread.contexts.last().copied(), thread.device));
        let of_context = current.and_then(|handle| self.contexts.get(&handle));
        of_context.map(|context| context.device).or(device).unwrap_or(0)
    }
}
