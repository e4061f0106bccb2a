//! The card of a bench target: a small buffer beside the one that is measured, which says where orders are taken. So
//! the initiator needs no more than the segment's name.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use serde::{Deserialize, Serialize};
use tensorferry::{
    Access, BufferInfo, Engine, HostBuffer, Op, RegisterOptions, Segment, SubmitOptions,
};

/// What is on it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Card {
    /// Of the program.
    pub(crate) version: String,
    /// On the target's host.
    pub(crate) orders_port: u16,
    /// The memory that is to be measured, in the target's process.
    pub(crate) addr: u64,
    pub(crate) len_bytes: u64,
}

/// Both ends have the same one, or do not talk.
pub(crate) const PROTOCOL: u32 = 1;
/// Few buffers of anybody else have this length.
const CARD_BYTES: usize = 1000;
const MAGIC: &[u8; 16] = b"tensorferry card";
/// What stands before the text: the magic, the protocol, the length of the text.
const HEAD: usize = MAGIC.len() + 8;
/// How many buffers of that length are looked at.
const LOOKS: usize = 16;
/// How long reading one may take.
const PATIENCE: Duration = Duration::from_secs(10);

impl Card {
    /// Lays the card out, where peers of `engine` can read it.
    ///
    /// # Errors
    /// There is no memory for it.
    pub(crate) fn publish(&self, engine: &Engine) -> Result<()> {
        let buffer = HostBuffer::zeroed(CARD_BYTES)?;
        buffer.write(0, &self.to_bytes()?);
        let options = RegisterOptions::default().with_access(Access::ReadOnly);
        Ok(engine.register_buffer(&buffer, &options)?)
    }

    /// Looks for a card among the buffers of a peer; `None`: it is no bench target.
    ///
    /// # Errors
    /// A buffer cannot be read, or the card is of another version.
    pub(crate) fn find(segment: &Segment, buffers: &[BufferInfo]) -> Result<Option<Self>> {
        let alike = buffers.iter().filter(|buffer| buffer.len == CARD_BYTES as u64);
        for buffer in alike.take(LOOKS) {
            let copy = HostBuffer::zeroed(CARD_BYTES)?;
            let request = copy.request(Op::Read, 0, buffer.addr, CARD_BYTES)?;
            let options = SubmitOptions::default().with_timeout(PATIENCE);
            segment.submit_owned(&[request], options)?.wait()?;
            if let Some(card) = Self::from_bytes(&copy.read(0, CARD_BYTES))? {
                let inside =
                    |buffer: &BufferInfo| buffer.addr == card.addr && card.len_bytes <= buffer.len;
                ensure!(
                    buffers.iter().any(inside),
                    "the target's card names memory that the target does not lend; start it again"
                );
                return Ok(Some(card));
            }
        }
        Ok(None)
    }

    fn to_bytes(&self) -> Result<Vec<u8>> {
        let text = serde_json::to_vec(self)?;
        let len = u32::try_from(text.len())?.to_le_bytes();
        let bytes = [&MAGIC[..], &PROTOCOL.to_le_bytes(), &len, &text].concat();
        ensure!(bytes.len() <= CARD_BYTES, "the card does not fit {CARD_BYTES} bytes");
        Ok(bytes)
    }

    /// `None` if this is no card.
    fn from_bytes(bytes: &[u8]) -> Result<Option<Self>> {
        let Some((head, text)) = bytes.split_at_checked(HEAD) else { return Ok(None) };
        if !head.starts_with(MAGIC) {
            return Ok(None);
        }
        let number = |at: usize| head[at..].first_chunk().map_or(0, |b| u32::from_le_bytes(*b));
        let (protocol, len) = (number(MAGIC.len()), number(MAGIC.len() + 4));
        ensure!(
            protocol == PROTOCOL,
            "the target speaks version {protocol} of the benchmark's orders, this program version {PROTOCOL}; run the \
             same version of tensorferry at both ends"
        );
        let text =
            text.get(..len as usize).ok_or_else(|| anyhow!("the target's card is cut off"))?;
        serde_json::from_slice(text).map(Some).context("the target's card cannot be understood")
    }
}

#[cfg(test)]
mod tests {
    use tensorferry::Config;

    use super::*;

    fn card() -> Card {
        Card { version: "1.2.3".into(), orders_port: 15002, addr: 0x7000_0000, len_bytes: 4096 }
    }

    #[test]
    fn a_card_is_read_as_it_was_written() {
        let mut bytes = card().to_bytes().unwrap();
        assert_eq!(Card::from_bytes(&bytes).unwrap(), Some(card()));
        bytes.resize(CARD_BYTES, 0);
        assert_eq!(Card::from_bytes(&bytes).unwrap(), Some(card()));
    }

    #[test]
    fn what_is_no_card_is_none_and_what_is_another_one_is_an_error() {
        assert_eq!(Card::from_bytes(&[0; CARD_BYTES]).unwrap(), None);
        assert_eq!(Card::from_bytes(b"tensorferry card").unwrap(), None, "cut off");
        let bytes = card().to_bytes().unwrap();
        let error = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = bytes.clone();
            change(&mut bytes);
            format!("{:#}", Card::from_bytes(&bytes).unwrap_err())
        };
        let text = error(&|bytes| bytes[MAGIC.len()] = 9);
        assert!(text.starts_with("the target speaks version 9 of the benchmark's"), "{text}");
        let text = error(&|bytes| bytes[MAGIC.len() + 7] = 0xff);
        assert_eq!(text, "the target's card is cut off");
        let text = error(&|bytes| bytes[HEAD] = b'x');
        assert!(text.starts_with("the target's card cannot be understood: "), "{text}");
    }

    #[test]
    fn the_initiator_finds_the_card_among_other_buffers() {
        let target = Engine::new("127.0.0.1", Config::default()).unwrap();
        let memory = HostBuffer::zeroed(8192).unwrap();
        target.register_buffer(&memory, &RegisterOptions::default()).unwrap();
        let alike = HostBuffer::zeroed(CARD_BYTES).unwrap();
        target.register_buffer(&alike, &RegisterOptions::default()).unwrap();
        let initiator = Engine::new("127.0.0.1", Config::default()).unwrap();
        let segment = initiator.open(target.name()).unwrap();
        let find = || Card::find(&segment, &segment.buffers().unwrap());
        assert_eq!(find().unwrap(), None);

        let card = Card { addr: memory.addr(), len_bytes: 8192, ..card() };
        card.publish(&target).unwrap();
        assert_eq!(find().unwrap(), Some(card.clone()));

        target.unregister(memory.addr()).unwrap();
        let text = find().unwrap_err().to_string();
        assert!(text.starts_with("the target's card names memory that"), "{text}");
    }
}
