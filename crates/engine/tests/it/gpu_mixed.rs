//! Batches over memory of many kinds, of many entries, and of several vendors.
#![expect(unsafe_code, reason = "memory that a framework has allocated, by its address")]

use tensorferry::gpu::Vendor;
use tensorferry::{Config, Engine, HostBuffer, Op, RegisterOptions, Request};
use tensorferry_simgpu::Memory;

use crate::common::{ms, within};
use crate::gpu::{MIB, Sim};
use crate::gpu_kit::{Block, Dice, Two, apart, end, submit, text};

/// Memory of some kind, what it should hold, and how much of it is spoken for.
struct Stretch<'a> {
    memory: Kind<'a>,
    holds: Vec<u8>,
    next: usize,
}

enum Kind<'a> {
    Host(HostBuffer),
    Pinned(Block<'a>),
    Device(Block<'a>),
}

impl<'a> Stretch<'a> {
    const LEN: usize = 5 * MIB;

    fn new(memory: Kind<'a>, seed: usize) -> Self {
        let holds = text(Self::LEN, seed).to_vec();
        match &memory {
            Kind::Host(buffer) => buffer.write(0, &holds),
            Kind::Pinned(block) | Kind::Device(block) => block.write(0, &holds),
        }
        Self { memory, holds, next: 0 }
    }

    /// One of each kind that there is.
    fn of_every_kind(sim: &'a Sim, seed: usize) -> Vec<Self> {
        let block = |device, kind| sim.alloc_on(device, Self::LEN, kind);
        let all = [
            Kind::Host(HostBuffer::zeroed(Self::LEN).unwrap()),
            Kind::Pinned(block(1, Memory::Pinned)),
            Kind::Pinned(block(0, Memory::PinnedWriteCombined)),
            Kind::Device(block(0, Memory::Device)),
            Kind::Device(block(1, Memory::Device)),
            Kind::Device(block(1, Memory::Managed)),
            Kind::Device(block(1, Memory::Mapped)),
            Kind::Device(block(0, Memory::Pool)),
        ];
        all.into_iter().enumerate().map(|(i, kind)| Self::new(kind, seed + i)).collect()
    }

    fn addr(&self) -> u64 {
        match &self.memory {
            Kind::Host(buffer) => buffer.addr(),
            Kind::Pinned(block) | Kind::Device(block) => block.addr,
        }
    }

    fn lend(&self, engine: &Engine) {
        if let Kind::Device(block) = &self.memory {
            return block.lend(engine);
        }
        // SAFETY: the test keeps it until both engines are gone.
        unsafe { engine.register(self.addr(), Self::LEN as u64, &RegisterOptions::default()) }
            .unwrap();
    }

    fn check(&self, what: &str) {
        let now = match &self.memory {
            Kind::Host(buffer) => buffer.read(0, Self::LEN),
            Kind::Pinned(block) | Kind::Device(block) => block.read(0, Self::LEN),
        };
        if now != self.holds {
            let at = now.iter().zip(&self.holds).position(|(a, b)| a != b);
            panic!("{what} is wrong from byte {at:?} on");
        }
    }
}

/// Requests between two stretches chosen at random, each over bytes that no other touches.
fn requests(
    dice: &mut Dice,
    local: &mut [Stretch<'_>],
    remote: &mut [Stretch<'_>],
) -> Vec<Request> {
    const LENS: [usize; 10] = [0, 1, 3, 511, 4096, 20_000, 65_537, 262_145, MIB, 3 * MIB];
    let mut requests = Vec::new();
    for _ in 0..400 {
        let here = dice.roll(local.len());
        let there = dice.roll(remote.len());
        let (here, there) = (&mut local[here], &mut remote[there]);
        let (len, gap) = (LENS[dice.roll(LENS.len())], dice.roll(4));
        let (a, b) = (here.next + gap, there.next + 2 * gap);
        if a.max(b) + len > Stretch::LEN {
            continue;
        }
        let op = if dice.roll(2) == 0 { Op::Read } else { Op::Write };
        let nowhere = len == 0 && gap == 0;
        requests.push(Request {
            op,
            local: if nowhere { 0 } else { here.addr() + a as u64 },
            remote: if nowhere { 7 } else { there.addr() + b as u64 },
            len: len as u64,
        });
        match op {
            Op::Read => here.holds[a..a + len].copy_from_slice(&there.holds[b..b + len]),
            Op::Write => there.holds[b..b + len].copy_from_slice(&here.holds[a..a + len]),
        }
        (here.next, there.next) = (a + len, b + len);
    }
    assert!(requests.len() > 50, "{}", requests.len());
    requests
}

fn one_batch_over_every_kind(two: &Two, sims: [&Sim; 2], registered: bool, seed: u64) {
    let mut local = Stretch::of_every_kind(sims[0], 11);
    let mut remote = Stretch::of_every_kind(sims[1], 31);
    remote.iter().for_each(|stretch| stretch.lend(&two.target));
    if registered {
        local.iter().for_each(|stretch| stretch.lend(&two.initiator));
    }
    for round in 0..2 {
        let mut dice = Dice(seed + round);
        let requests = requests(&mut dice, &mut local, &mut remote);
        let batch = submit(&two.segment, requests, within(ms(20_000))).unwrap();
        end(&batch).unwrap();
        assert!((0..batch.len()).all(|i| batch.entry(i).unwrap().is_ok()));
        for (i, (here, there)) in local.iter_mut().zip(&mut remote).enumerate() {
            let name = sims[0].file.display();
            here.check(&format!("local kind {i}, {name}, registered {registered}, round {round}"));
            there
                .check(&format!("remote kind {i}, {name}, registered {registered}, round {round}"));
            (here.next, there.next) = (0, 0);
        }
    }
}

apart! {
    fn one_batch_may_be_over_memory_of_every_kind() {
        for (seed, sim) in Sim::every().iter().enumerate() {
            let two = Two::new(&sim.config());
            one_batch_over_every_kind(&two, [sim, sim], true, 5 + seed as u64);
            if sim.vendor == Vendor::Cuda && !sim.file.ends_with("libcuda.so.1") {
                // A CUDA runtime is not asked about what nobody has named.
                continue;
            }
            let two = Two::new(&sim.config());
            one_batch_over_every_kind(&two, [sim, sim], false, 50 + seed as u64);
        }
    }
}

apart! {
    /// Some drivers answer questions about addresses only to threads with a context.
    fn a_driver_that_wants_a_context_for_an_answer_gets_one() {
        let sim = Sim::cuda();
        sim.control.set("query_needs_context", 1);
        let two = Two::new(&sim.config());
        one_batch_over_every_kind(&two, [&sim, &sim], false, 3);
        assert_eq!(sim.control.count("thread.contexts"), 0, "this thread has none afterwards");
    }
}

apart! {
    /// As through a large window on the bus: it can be read by the host, a tenth as fast.
    fn memory_that_the_host_could_touch_is_staged_all_the_same(SIMGPU_ACCESS = "host") {
        let sim = Sim::new(Vendor::Hip, &["libamdhip64.so.6"]);
        let two = Two::new(&sim.config());
        one_batch_over_every_kind(&two, [&sim, &sim], false, 4);
        let (local, remote) = (sim.alloc(MIB), sim.alloc(MIB));
        remote.lend(&two.target);
        sim.control.reset();
        two.run(vec![local.request(Op::Write, 0, remote.addr, MIB)]).unwrap();
        assert_eq!(sim.control.count("d2h_bytes"), MIB as u64);
        assert_eq!(sim.control.count("h2d_bytes"), MIB as u64);
    }
}

apart! {
    fn the_ends_of_a_transfer_may_be_of_different_vendors() {
        let (cuda, hip) = (Sim::cuda(), Sim::new(Vendor::Hip, &["libamdhip64.so.5"]));
        let musa = Sim::new(Vendor::Musa, &["libmusart.so.5", "libmusa.so.1"]);
        for (here, there) in [(&cuda, &hip), (&hip, &musa), (&musa, &cuda)] {
            let two = Two::with(here.config(), there.config());
            one_batch_over_every_kind(&two, [here, there], true, 77);
        }
    }
}

apart! {
    fn one_batch_may_be_over_memory_of_three_vendors() {
        let sims = [
            Sim::cuda(),
            Sim::new(Vendor::Hip, &["libamdhip64.so.6"]),
            Sim::every().swap_remove(3),
        ];
        let config = sims.iter().fold(Config::default(), |config, sim| sim.add_to(config));
        let two = Two::new(&config);
        let all = |seed| -> Vec<_> {
            let each = sims
                .iter()
                .enumerate()
                .flat_map(|(i, sim)| [0, 1].map(|device| (seed + 2 * i + device, sim, device)));
            each.map(|(seed, sim, device)| {
                let block = sim.alloc_on(device as u32, Stretch::LEN, Memory::Device);
                Stretch::new(Kind::Device(block), seed)
            })
            .collect()
        };
        let (mut local, mut remote) = (all(10), all(20));
        remote.iter().for_each(|stretch| stretch.lend(&two.target));
        local[..3].iter().for_each(|stretch| stretch.lend(&two.initiator));
        let requests = requests(&mut Dice(99), &mut local, &mut remote);
        two.run(requests).unwrap();
        for (i, stretch) in local.iter().chain(&remote).enumerate() {
            stretch.check(&format!("stretch {i}"));
        }
    }
}

apart! {
    fn thousands_of_blocks_are_gathered_and_scattered() {
        const BLOCK: usize = 4096;
        const COUNT: usize = 2000;
        // Neighbours here are far apart there, as the blocks of a KV cache are.
        let place = |i: usize| i * 769 % COUNT;
        let sim = Sim::cuda();
        let two = Two::new(&sim.config());
        let (local, remote) = (sim.alloc(2 * COUNT * BLOCK), sim.alloc(COUNT * BLOCK));
        remote.lend(&two.target);
        local.lend(&two.initiator);
        for (seed, op) in [(3, Op::Write), (4, Op::Read), (5, Op::Write)] {
            let bytes = text(COUNT * BLOCK, seed);
            local.fill(0x5a);
            remote.write(0, &vec![0; COUNT * BLOCK]);
            for i in 0..COUNT {
                let block = &bytes[i * BLOCK..][..BLOCK];
                match op {
                    Op::Write => local.write(2 * i * BLOCK, block),
                    Op::Read => remote.write(place(i) * BLOCK, block),
                }
            }
            let one = |i: usize| {
                local.request(op, 2 * i * BLOCK, remote.addr + (place(i) * BLOCK) as u64, BLOCK)
            };
            two.run((0..COUNT).map(one).collect()).unwrap();
            let (here, there) = (local.read(0, local.len), remote.read(0, remote.len));
            for i in 0..COUNT {
                let block = &bytes[i * BLOCK..][..BLOCK];
                assert!(here[2 * i * BLOCK..][..BLOCK] == *block, "{op:?} of block {i}");
                assert!(there[place(i) * BLOCK..][..BLOCK] == *block, "{op:?} of block {i}");
                let between = &here[(2 * i + 1) * BLOCK..][..BLOCK];
                assert!(between == [0x5a; BLOCK], "{op:?}, behind block {i}");
            }
        }
    }
}
