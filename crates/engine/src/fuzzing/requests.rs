//! Requests of a stranger, against the memory of a target.

use std::sync::{Arc, LazyLock, Mutex};

use tensorferry_wire::{HEADER_LEN, Header, Op, Status, Version};

use crate::fuzzing::Cuts;
use crate::memory::{CopyMode, HostBuffer, Span};
use crate::registry::{Access, BufferInfo, Range, Registry};
use crate::staging::{Alarm, Bell};
use crate::sync::locked;
use crate::tcp::{Direct, MAX_CALL_BYTES, MAX_CALL_SPANS, Rules, Serve, Served, status_frame};

const PAGE: usize = 4096;
/// The addresses of requests that were captured from peers begin here, and so does the first buffer.
const BASE: u64 = 0x6000_0000_0000;
const START: u64 = BASE - PAGE as u64;

/// The memory page by page from `START` on: what is registered, and what lies between.
const AREAS: [(usize, Option<Access>); 10] = [
    (1, None),
    (1, Some(Access::ReadWrite)),
    // No gap: a range over both is in neither.
    (1, Some(Access::ReadWrite)),
    (1, None),
    (1, Some(Access::ReadOnly)),
    (1, None),
    (1, Some(Access::Local)),
    (1, None),
    (16, Some(Access::ReadWrite)),
    (1, None),
];

const PAGES: usize = 25;

/// Mapped once, since its address is fixed.
static MEMORY: LazyLock<Mutex<HostBuffer>> = LazyLock::new(|| {
    Mutex::new(HostBuffer::zeroed_at(START, PAGES * PAGE).expect("nothing else is mapped there"))
});

/// Requests, against memory of which some may be written, some may be read, and some is nobody's business.
pub fn requests(input: &[u8]) {
    let Some((&seed, stream)) = input.split_first() else { return };
    let memory = locked(&MEMORY);
    memory.write(0, &INITIAL);
    let mut cuts = Cuts::new(seed);
    let unregisters = seed & 0x80 != 0;
    let mut target = Target::new(&memory);
    let mut rest = stream;
    while !rest.is_empty() && !target.faulted {
        if !target.serve.wants_input() {
            target.leave(usize::MAX);
            continue;
        }
        let (now, later) = rest.split_at(cuts.next(rest.len()));
        target.arrive(now, cuts.flip());
        rest = later;
        if cuts.flip() {
            target.leave(cuts.next(usize::MAX));
        }
        if unregisters && rest.len() < stream.len() / 2 {
            target.unregister();
        }
    }
    while target.serve.wants_output() {
        target.leave(usize::MAX);
    }
    let Target { seen, gone, .. } = target;
    let mut model = Model::new();
    if gone {
        // When it went is not in the model; who may be written is.
        return model.check_untouched(&memory);
    }
    model.take(stream);
    assert_eq!(seen, model.answers, "the answers");
    assert!(memory.read(0, PAGES * PAGE) == model.memory, "the memory");
}

/// Every byte depends on its place.
static INITIAL: LazyLock<Vec<u8>> =
    LazyLock::new(|| (0..PAGES * PAGE).map(|i| (i ^ (i >> 8)) as u8).collect());

/// The areas, each with its first address and its length.
fn areas() -> impl Iterator<Item = (BufferInfo, Option<Access>)> {
    let mut addr = START;
    AREAS.into_iter().map(move |(pages, access)| {
        let info = BufferInfo { addr, len: (pages * PAGE) as u64 };
        addr += info.len;
        (info, access)
    })
}

/// Whether a peer may do this, by the rules as they are written down.
fn is_allowed(op: Op, addr: u64, len: u64) -> bool {
    let inside = |b: &BufferInfo| {
        addr >= b.addr && u128::from(addr) + u128::from(len) <= u128::from(b.addr + b.len)
    };
    let allows = |access| match access {
        Some(Access::ReadWrite) => true,
        Some(Access::ReadOnly) => op == Op::Read,
        Some(Access::AsMapped | Access::Local) | None => false,
    };
    len > 0 && areas().any(|(info, access)| inside(&info) && allows(access))
}

/// What is sent to the peer: frames by their bytes, payloads by their places.
#[derive(Debug, Default, Eq, PartialEq)]
struct Answers {
    pieces: Vec<Piece>,
}

#[derive(Debug, Eq, PartialEq)]
enum Piece {
    Frames(Vec<u8>),
    Payload { addr: u64, len: u64 },
}

impl Answers {
    fn frame(&mut self, bytes: &[u8]) {
        match self.pieces.last_mut() {
            Some(Piece::Frames(frames)) => frames.extend_from_slice(bytes),
            _ => self.pieces.push(Piece::Frames(bytes.to_vec())),
        }
    }

    fn payload(&mut self, addr: u64, len: u64) {
        match self.pieces.last_mut() {
            Some(Piece::Payload { addr: from, len: known }) if *from + *known == addr => {
                *known += len;
            }
            _ => self.pieces.push(Piece::Payload { addr, len }),
        }
    }
}

struct Target<'m> {
    memory: &'m HostBuffer,
    registry: Registry,
    serve: Serve,
    served: Served,
    bell: Arc<dyn Bell>,
    spans: Vec<Span>,
    seen: Answers,
    faulted: bool,
    gone: bool,
}

impl<'m> Target<'m> {
    fn new(memory: &'m HostBuffer) -> Self {
        let registry = Registry::new();
        for (info, access) in areas() {
            let Some(access) = access else { continue };
            let range = Range::host(info, access);
            registry.register(vec![range], Default::default(), None).expect("they do not overlap");
        }
        let (serve, served) = (Serve::new(), Served::default());
        let (bell, spans) = (Alarm::here(), Vec::new());
        let seen = Answers::default();
        Self { memory, registry, serve, served, bell, spans, seen, faulted: false, gone: false }
    }

    /// Bytes come; `direct`: a long payload is received in place.
    fn arrive(&mut self, mut bytes: &[u8], direct: bool) {
        let place = self.serve.direct(&self.bell).expect("no device is involved");
        if let Direct::At(span) = place
            && direct
        {
            assert!(is_allowed(Op::Write, span.addr, span.len as u64), "{span:?} is written");
            let (now, later) = bytes.split_at(bytes.len().min(span.len));
            self.memory.write((span.addr - START) as usize, now);
            self.serve.received_direct(now.len() as u64, &mut self.served);
            bytes = later;
        }
        let rules = Rules { registry: &self.registry, mode: CopyMode::Direct, bell: &self.bell };
        self.faulted = self.serve.received(bytes, &rules, &mut self.served).is_err();
    }

    /// A send call of which the socket takes `most` bytes.
    fn leave(&mut self, most: usize) {
        self.spans.clear();
        self.serve.plan(&mut self.spans);
        assert!(self.spans.len() <= MAX_CALL_SPANS);
        assert!(self.spans.iter().map(|s| s.len as u64).sum::<u64>() <= MAX_CALL_BYTES);
        let mut left = most;
        for span in &self.spans {
            let len = span.len.min(left);
            left -= len;
            if len == 0 {
                break;
            }
            match status_frame(*span) {
                Some(bytes) => self.seen.frame(&bytes[..len]),
                None => {
                    assert!(is_allowed(Op::Read, span.addr, span.len as u64), "{span:?} is sent");
                    self.seen.payload(span.addr, len as u64);
                }
            }
        }
        self.serve.sent(most - left);
    }

    /// Takes the first buffer away, if nobody uses it now.
    fn unregister(&mut self) {
        if !self.gone && !self.serve.uses(BASE) {
            let nobody = |_| panic!("the buffer is not in use");
            self.registry.unregister(&[BASE], nobody).expect("it is registered");
            self.gone = true;
        }
    }
}

/// A target that has the whole stream at once, and looks at one request after the other.
struct Model {
    memory: Vec<u8>,
    answers: Answers,
}

impl Model {
    fn new() -> Self {
        Self { memory: INITIAL.clone(), answers: Answers::default() }
    }

    fn take(&mut self, mut rest: &[u8]) {
        while let Some((head, behind)) = rest.split_first_chunk::<HEADER_LEN>() {
            let Ok(Header { op, version, addr, len }) = Header::parse(head) else { return };
            rest = behind;
            if !is_allowed(op, addr, len) {
                if version == Version::V2 {
                    self.answers.frame(&Status::Rejected.encode());
                }
                return;
            }
            if op == Op::Read {
                if version == Version::V2 {
                    self.answers.frame(&Status::Applied.encode());
                }
                self.answers.payload(addr, len);
                continue;
            }
            let (payload, behind) = rest.split_at(rest.len().min(len as usize));
            self.memory[(addr - START) as usize..][..payload.len()].copy_from_slice(payload);
            rest = behind;
            if payload.len() as u64 == len && version == Version::V2 {
                self.answers.frame(&Status::Applied.encode());
            }
        }
    }

    fn check_untouched(&self, memory: &HostBuffer) {
        for (info, access) in areas() {
            if access != Some(Access::ReadWrite) {
                let (at, len) = ((info.addr - START) as usize, info.len as usize);
                assert!(memory.read(at, len) == self.memory[at..][..len], "{info:?} was written");
            }
        }
    }
}
