//! Requests that are wrong in every way, at the data port of an engine that others are using.
#![expect(unsafe_code, reason = "memory with neighbours that must not be touched")]

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use socket2::SockRef;
use tensorferry::{Access, Engine, HostBuffer, Op, RegisterOptions, Version};
use tensorferry_wire::{HEADER_LEN, Header, STATUS_LEN, Status};

use crate::common::{Dice, alone, buffer, engine, lanes, pattern, resident, start};

const FRAMES: u64 = 200_000;
const CLIENTS: u64 = 4;
const PAGE: usize = 4096;
/// What the engine may hold in addition while all this comes.
const MORE_MEMORY: u64 = 16 << 20;

#[test]
fn mutated_frames_are_refused_or_closed_and_change_nothing() {
    alone("mutated::mutated_frames_alone");
}

#[test]
#[ignore = "counts memory of the process, and would end it if it failed, so it is started by itself"]
fn mutated_frames_alone() {
    let yard = Yard::new();
    let target = engine(lanes(1, 2));
    yard.register(&target);
    let honest = HostBuffer::zeroed(256 << 10).unwrap();
    target.register_buffer(&honest, &RegisterOptions::default()).unwrap();
    let attack = |frames: u64, seed: u64| {
        let sent = AtomicU64::new(0);
        std::thread::scope(|threads| {
            for client in 0..CLIENTS {
                let (yard, sent, target) = (&yard, &sent, &target);
                let mut dice = Dice::new(seed + client);
                threads.spawn(move || {
                    while sent.load(Ordering::Relaxed) < frames {
                        let train = Train::new(yard, &mut dice);
                        sent.fetch_add(train.frames, Ordering::Relaxed);
                        train.run(target.data_port());
                    }
                });
            }
        });
        sent.into_inner()
    };
    attack(4000, 100);
    let before = resident();
    let over = AtomicBool::new(false);
    let (sent, rounds) = std::thread::scope(|threads| {
        let client = threads.spawn(|| honest_client(&target, &honest, &over));
        let sent = attack(FRAMES, 1);
        over.store(true, Ordering::Relaxed);
        (sent, client.join().unwrap())
    });
    assert!(rounds > 10, "the honest client came {rounds} times");
    assert_eq!(honest_client(&target, &honest, &AtomicBool::new(true)), 1, "and goes on");
    let more = resident().saturating_sub(before);
    eprintln!("{sent} frames, {rounds} honest rounds, {} KiB more", more >> 10);
    assert!(more <= MORE_MEMORY, "{more} bytes more");
    yard.check();
}

/// Writes, reads and compares until it is over; how many rounds that were.
fn honest_client(target: &Engine, remote: &HostBuffer, over: &AtomicBool) -> u64 {
    let initiator = engine(lanes(2, 1));
    let segment = initiator.open(target.name()).unwrap();
    let local = HostBuffer::zeroed(remote.len()).unwrap();
    for round in 1.. {
        let bytes = pattern(remote.len(), round);
        start(&segment, Op::Write, &buffer(&bytes), remote.addr()).wait().unwrap();
        assert!(remote.read(0, remote.len()) == bytes);
        start(&segment, Op::Read, &local, remote.addr()).wait().unwrap();
        assert!(local.read(0, local.len()) == bytes);
        if over.load(Ordering::Relaxed) {
            return round;
        }
    }
    unreachable!("it ends when it is over")
}

/// Buffers with canaries between them, and pages at both ends that end the process if they are touched.
struct Yard {
    addr: usize,
}

/// What peers may do with the pages between the guards.
const PAGES: [Option<Access>; 9] = [
    None,
    Some(Access::ReadWrite),
    // No gap: a range over both is in neither.
    Some(Access::ReadWrite),
    None,
    Some(Access::ReadOnly),
    Some(Access::Local),
    None,
    Some(Access::ReadWrite),
    // Nothing lies between the last buffer and the guard.
    Some(Access::ReadWrite),
];
const CANARY: u8 = 0xa5;

impl Yard {
    fn new() -> Self {
        let len = (PAGES.len() + 2) * PAGE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: an anonymous mapping at an address of the kernel's choice changes nothing that exists.
        let whole = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(whole, libc::MAP_FAILED);
        let addr = whole as usize + PAGE;
        let inside = std::ptr::with_exposed_provenance_mut::<u8>(addr);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the pages between the first and the last of the mapping, which nobody uses.
        assert_eq!(unsafe { libc::mprotect(inside.cast(), PAGES.len() * PAGE, access) }, 0);
        // SAFETY: mapped and writable since the last call.
        unsafe { inside.write_bytes(CANARY, PAGES.len() * PAGE) };
        Self { addr }
    }

    fn page(&self, i: usize) -> u64 {
        (self.addr + i * PAGE) as u64
    }

    fn register(&self, target: &Engine) {
        for (i, access) in PAGES.into_iter().enumerate() {
            let Some(access) = access else { continue };
            let options = RegisterOptions::default().with_access(access);
            // SAFETY: the pages stay mapped as long as the process.
            unsafe { target.register(self.page(i), PAGE as u64, &options) }.unwrap();
        }
    }

    /// Whether a peer may do this.
    fn allows(&self, op: Op, addr: u64, len: u64) -> bool {
        let Some(at) = addr.checked_sub(self.addr as u64) else { return false };
        let access = usize::try_from(at).ok().and_then(|at| PAGES.get(at / PAGE)).copied();
        let inside = len > 0 && len <= PAGE as u64 && at % PAGE as u64 + len <= PAGE as u64;
        let allowed = match access.flatten() {
            Some(Access::ReadWrite) => true,
            Some(Access::ReadOnly) => op == Op::Read,
            _ => false,
        };
        inside && allowed
    }

    fn check(&self) {
        for (i, access) in PAGES.into_iter().enumerate() {
            if access == Some(Access::ReadWrite) {
                continue;
            }
            let from = std::ptr::with_exposed_provenance::<u8>(self.page(i) as usize);
            let mut page = vec![0; PAGE];
            // SAFETY: a page of the mapping; nobody writes to it, which is what is looked at.
            unsafe { from.copy_to_nonoverlapping(page.as_mut_ptr(), PAGE) };
            assert!(page.iter().all(|b| *b == CANARY), "page {i} ({access:?}) was written");
        }
    }
}

/// Frames of one connection, and what is to come back for them.
struct Train {
    bytes: Vec<u8>,
    frames: u64,
    /// Answers to what stands before the first frame that is wrong.
    owed: usize,
    /// The first wrong frame is answered with a refusal.
    refused: bool,
    /// It ends in a reset, which may destroy the answers before it.
    reset: bool,
}

impl Train {
    fn new(yard: &Yard, dice: &mut Dice) -> Self {
        let mut train =
            Self { bytes: Vec::new(), frames: 0, owed: 0, refused: false, reset: false };
        let (mut right, most) = (true, 1 + dice.below(9));
        // Some go on behind the wrong frame, which must not be looked at.
        while train.frames < most || right {
            let frame = mutated(yard, dice);
            train.frames += 1;
            train.bytes.extend_from_slice(&frame);
            if !right {
                continue;
            }
            let Ok(Header { op, version, addr, len }) = Header::parse(&frame) else {
                (right, train.reset) = (false, true);
                continue;
            };
            right = yard.allows(op, addr, len);
            let status = if version == Version::V2 { STATUS_LEN } else { 0 };
            match op {
                _ if !right => (train.refused, train.reset) = (status > 0, status == 0),
                Op::Read => train.owed += status + len as usize,
                Op::Write => {
                    train.bytes.resize(train.bytes.len() + len as usize, 0x77);
                    train.owed += status;
                }
            }
        }
        train
    }

    fn run(&self, port: u16) {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // No connection is left behind that waits for its time.
        SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
        // The target may have hung up before it was told everything.
        let _ = stream.write_all(&self.bytes);
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::with_capacity(self.owed + STATUS_LEN + 1);
        match stream.read_to_end(&mut answer) {
            Ok(_) => {}
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::ConnectionReset, "neither answer nor end: {e}")
            }
        }
        let refusal = Status::Rejected.encode();
        if self.reset {
            assert!(answer.len() <= self.owed, "{} of {} bytes", answer.len(), self.owed);
        } else {
            assert_eq!(answer.len(), self.owed + STATUS_LEN, "{} frames", self.frames);
            assert!(self.refused && answer.ends_with(&refusal));
        }
    }
}

/// A header that was right once, but for some.
fn mutated(yard: &Yard, dice: &mut Dice) -> [u8; HEADER_LEN] {
    let ours = yard.page(dice.one_of(&[1, 2, 4, 7, 8]));
    let mut header = Header {
        op: dice.one_of(&[Op::Read, Op::Write]),
        version: dice.one_of(&[Version::V2, Version::V2, Version::V1]),
        addr: ours + dice.below(PAGE as u64),
        len: 1 + dice.below(64),
    };
    let end = ours + PAGE as u64;
    let near = 1 + dice.below(64);
    let any = [dice.roll(), dice.roll() >> 17];
    match dice.below(10) {
        // Past the end of its buffer, by little and by much.
        0 => (header.addr, header.len) = (end - near, near + 1 + dice.below(64)),
        1 => header.len = PAGE as u64 * (1 + dice.below(20)),
        // Past the end of all addresses.
        2 => header.len = u64::MAX - header.addr + dice.below(3),
        3 => (header.addr, header.len) = (u64::MAX - near, near + dice.below(3)),
        4 => header.len = dice.one_of(&[0, 1 << 63, u64::MAX, (1 << 63) + near, 1 << 62, 1 << 48]),
        // Elsewhere: what is not registered, what is for nobody, what is read-only, what is not mapped.
        5 => header.addr = yard.page(dice.one_of(&[0, 3, 4, 5, 6])) + dice.below(PAGE as u64),
        6 => header.addr = dice.one_of(&[0, 1, yard.page(0) - near, end, any[0], any[1]]),
        // In a buffer as it should be.
        7 => header.addr = ours + dice.below(PAGE as u64 - 64),
        _ => {}
    }
    let mut bytes = header.encode();
    match dice.below(6) {
        0 => bytes[16] = dice.roll() as u8,
        1 => bytes[dice.below(HEADER_LEN as u64) as usize] ^= 1 << dice.below(8),
        2 if dice.below(4) == 0 => bytes.iter_mut().for_each(|b| *b = dice.roll() as u8),
        _ => {}
    }
    bytes
}
