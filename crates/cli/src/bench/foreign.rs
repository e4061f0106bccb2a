//! A target that takes no orders: any other engine that lends memory. What has to be there is written there with the
//! engine, and what was written is read back with it.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tensorferry::{
    Access, Batch, BufferInfo, Engine, HostBuffer, Op, RegisterOptions, Segment, SubmitOptions,
};

use crate::measure::rounds::{Part, Remote};
use crate::memory::Buffer;
use crate::pattern::{Mismatch, Pattern};

/// Its memory, and a copy of what it holds.
pub(crate) struct Foreign {
    segment: Segment,
    buffer: BufferInfo,
    /// `None` if nothing is verified.
    copy: Option<Buffer>,
    /// What is being written.
    filling: Option<Batch>,
}

impl Foreign {
    /// Chooses the largest of its `buffers`.
    ///
    /// # Errors
    /// It lends none, or it may not be overwritten.
    pub(crate) fn choose(
        segment: &Segment,
        buffers: &[BufferInfo],
        (overwrites, allowed): (bool, bool),
    ) -> Result<Self> {
        let name = segment.name();
        let largest = buffers.iter().max_by_key(|buffer| buffer.len);
        let buffer = *largest.with_context(|| {
            format!(
                "{name} lends no memory; register a buffer there, or run `tensorferry bench target`"
            )
        })?;
        ensure!(
            !overwrites || allowed,
            "{name} is no `tensorferry bench target`, and measuring overwrites the largest buffer that it lends ({} bytes \
             at {:#x}), which somebody may need; if nobody does, add --overwrite; --op read --no-verify leaves it as it is",
            buffer.len,
            buffer.addr
        );
        Ok(Self { segment: segment.clone(), buffer, copy: None, filling: None })
    }

    pub(crate) fn buffer(&self) -> BufferInfo {
        self.buffer
    }

    /// Makes room for a copy of the first `bytes`.
    ///
    /// # Errors
    /// There is not so much memory here.
    pub(crate) fn prepare(&mut self, engine: &Engine, bytes: usize) -> Result<()> {
        let copy = HostBuffer::zeroed(bytes)
            .context("not enough memory here to verify; use smaller --sizes or --batches")?;
        let local = RegisterOptions::default().with_access(Access::Local);
        engine.register_buffer(&copy, &local)?;
        self.copy = Some(Buffer::Host(copy));
        Ok(())
    }

    fn copy(&self) -> Result<&Buffer> {
        self.copy.as_ref().context("nothing was prepared for verifying")
    }

    fn start(&self, op: Op, part: Part) -> Result<Batch> {
        let remote = self.buffer.addr + part.offset as u64;
        let request = self.copy()?.request(op, part.offset, remote, part.len)?;
        Ok(self.segment.submit_owned(&[request], SubmitOptions::default())?)
    }
}

impl Remote for Foreign {
    fn fill(&mut self, pattern: Pattern, len_bytes: usize) -> Result<()> {
        pattern.fill(self.copy()?, len_bytes)?;
        self.filling = Some(self.start(Op::Write, Part { offset: 0, len: len_bytes })?);
        Ok(())
    }

    fn filled(&mut self, _len_bytes: usize) -> Result<()> {
        let batch = self.filling.take().context("nothing is being written")?;
        batch.wait().context("the target's memory could not be filled")
    }

    /// The copy holds what the memory was filled with, which is the complement of what is looked for: bytes that are not
    /// read back are wrong for certain.
    fn check(&mut self, pattern: Pattern, part: Part) -> Result<Option<Mismatch>> {
        let batch = self.start(Op::Read, part)?;
        batch.wait().context("the target's memory could not be read back")?;
        Ok(pattern.check_part(self.copy()?, part.offset, part.len)?)
    }

    fn process_time(&mut self) -> Result<Option<Duration>> {
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use tensorferry::Config;

    use super::*;

    const LEN: usize = 1 << 16;

    fn two() -> (Engine, Engine, Segment) {
        let engine = || Engine::new("127.0.0.1", Config::default()).unwrap();
        let (target, initiator) = (engine(), engine());
        let segment = initiator.open(target.name()).unwrap();
        (target, initiator, segment)
    }

    fn lent(target: &Engine, len: usize) -> HostBuffer {
        let buffer = HostBuffer::zeroed(len).unwrap();
        target.register_buffer(&buffer, &RegisterOptions::default()).unwrap();
        buffer
    }

    #[test]
    fn its_memory_is_filled_and_compared_with_the_engine() {
        let (target, initiator, segment) = two();
        lent(&target, LEN / 2);
        let memory = lent(&target, LEN);
        let buffers = segment.buffers().unwrap();
        let mut foreign = Foreign::choose(&segment, &buffers, (true, true)).unwrap();
        assert_eq!(foreign.buffer().addr, memory.addr(), "the largest one");
        foreign.prepare(&initiator, LEN).unwrap();

        let pattern = Pattern::of_round(3, 1);
        foreign.fill(pattern.complement(), LEN).unwrap();
        foreign.filled(LEN).unwrap();
        assert_eq!(
            pattern.complement().check(&Buffer::Host(memory.clone()), LEN).unwrap(),
            None,
            "it is there"
        );
        let part = Part { offset: 8, len: 1000 };
        let stale = foreign.check(pattern, part).unwrap().unwrap();
        assert_eq!((stale.wrong_bytes, stale.first_offset_bytes), (1000, 8));
        pattern.fill(&Buffer::Host(memory.clone()), LEN).unwrap();
        assert_eq!(foreign.check(pattern, part).unwrap(), None);
        let byte = memory.read(500, 1)[0];
        memory.write(500, &[!byte]);
        assert_eq!(foreign.check(pattern, part).unwrap().unwrap().wrong_bytes, 1);
        assert_eq!(foreign.process_time().unwrap(), None);
    }

    #[test]
    fn memory_that_somebody_may_need_is_left_alone() {
        let (target, _initiator, segment) = two();
        let choose = |overwrites, allowed| {
            let buffers = segment.buffers().unwrap();
            Foreign::choose(&segment, &buffers, (overwrites, allowed)).map(|_| ())
        };
        let text = choose(true, true).unwrap_err().to_string();
        assert!(text.starts_with(&format!("{} lends no memory; ", target.name())), "{text}");
        lent(&target, LEN);
        let text = choose(true, false).unwrap_err().to_string();
        assert!(text.contains("is no `tensorferry bench target`"), "{text}");
        assert!(text.contains("(65536 bytes at 0x") && text.contains("--overwrite"), "{text}");
        choose(false, false).unwrap();
        choose(true, true).unwrap();
    }
}
