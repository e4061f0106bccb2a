//! What strangers and mistakes may cost.

use std::io::Write;
use std::net::TcpStream;

use tensorferry::{Batch, Config, HostBuffer, Op, Request, SubmitOptions};
use tensorferry_wire::{FrameKind, MessageType, encode_frame};

use crate::common::{PROMPT, Pair, alone, engine, eventually, ms, resident, start, timed, within};

/// Requests over addresses that nobody owns: by the engine's word an error, or a refusal.
#[expect(unsafe_code, reason = "the ranges are made up")]
fn submit(pair: &Pair, requests: Vec<Request>, options: SubmitOptions) -> Batch {
    // SAFETY: nothing of it is mapped as a whole; the engine says so and touches nothing.
    unsafe { pair.segment.submit(requests, options) }.unwrap()
}

#[test]
fn a_length_beyond_reason_costs_neither_time_nor_memory() {
    alone("bounds::a_length_beyond_reason_alone");
}

#[test]
#[ignore = "counts memory of the process, so it is started by itself"]
fn a_length_beyond_reason_alone() {
    let pair = Pair::new(1 << 20);
    let local = HostBuffer::zeroed(4096).unwrap();
    start(&pair.segment, Op::Write, &local, pair.remote.addr()).wait().unwrap();
    let before = resident();
    for len in [1 << 40, 1 << 45, 1 << 48] {
        for remote in [pair.remote.addr(), 1 << 20] {
            let request = Request { op: Op::Read, local: local.addr(), remote, len };
            let (result, took) = timed(|| submit(&pair, vec![request], within(ms(5000))).wait());
            assert_eq!(result.unwrap_err().code(), 9);
            assert!(took < PROMPT, "{took:?}");
        }
    }
    let requests = vec![Request { op: Op::Read, local: local.addr(), remote: 16, len: 8 }; 500_000];
    let bad = submit(&pair, requests, within(ms(20_000)));
    let good = start(&pair.segment, Op::Write, &local, pair.remote.addr());
    assert_eq!(bad.wait().unwrap_err().code(), 9);
    good.wait().unwrap();
    drop(bad);
    assert!(resident() < before + (256 << 20), "{} of {before}", resident());
}

#[test]
fn half_requests_on_the_control_port_are_kept_up_to_a_bound() {
    alone("bounds::half_requests_on_the_control_port_alone");
}

#[test]
#[ignore = "counts memory of the process, so it is started by itself"]
fn half_requests_on_the_control_port_alone() {
    let e = engine(Config::default());
    let before = resident();
    let mut frame = (15_u64 << 20).to_le_bytes().to_vec();
    frame.push(2);
    frame.resize(12 << 20, b' ');
    let mut most = 0;
    let mut streams = Vec::new();
    for _ in 0..60 {
        let mut stream = TcpStream::connect(("127.0.0.1", e.control_port())).unwrap();
        // It fails if the engine has cut the connection already, and what it has taken is what counts.
        let _ = stream.write_all(&frame);
        streams.push(stream);
        most = most.max(resident());
    }
    assert!(most < before + (200 << 20), "{most} of {before}");
    drop(streams);
    eventually("room again", || engine(Config::default()).probe(e.name()).is_ok());
}

#[test]
fn those_who_ask_and_do_not_listen_cost_little() {
    alone("bounds::those_who_ask_and_do_not_listen_alone");
}

#[test]
#[ignore = "counts memory of the process, so it is started by itself"]
fn those_who_ask_and_do_not_listen_alone() {
    const EACH: u64 = 64;
    let e = engine(Config::default());
    // A descriptor as long as they get.
    let memory = HostBuffer::zeroed(20_000 * EACH as usize).unwrap();
    for i in 0..20_000 {
        let addr = memory.addr() + i * EACH;
        #[expect(unsafe_code, reason = "many buffers in one mapping")]
        // SAFETY: `memory` outlives the engine's use.
        unsafe { e.register(addr, EACH, &Default::default()) }.unwrap();
    }
    let initiator = engine(Config::default());
    initiator.open(e.name()).unwrap();
    let before = resident();
    let ask = encode_frame(FrameKind::Typed(MessageType::Metadata), b"{}");
    let deaf: Vec<TcpStream> = (0..300)
        .map(|_| {
            let mut stream = TcpStream::connect(("127.0.0.1", e.control_port())).unwrap();
            socket2::SockRef::from(&stream).set_recv_buffer_size(4096).unwrap();
            stream.write_all(&ask).unwrap();
            stream
        })
        .collect();
    // Whoever comes behind them is answered when they have been.
    initiator.probe(e.name()).unwrap();
    let more = resident().saturating_sub(before);
    eprintln!("{} KiB more for 300 who do not listen to 1 MiB each", more >> 10);
    assert!(more < 20 << 20, "{more} bytes more");
    drop(deaf);
}

#[test]
fn a_range_over_two_buffers_is_quiet_after_either_is_unregistered() {
    let pair = Pair::new(64 << 20);
    let local = HostBuffer::zeroed(64 << 20).unwrap();
    let half = (local.len() / 2) as u64;
    #[expect(unsafe_code, reason = "two buffers in one mapping")]
    for addr in [local.addr(), local.addr() + half] {
        // SAFETY: `local` outlives the engine's use.
        unsafe { pair.initiator.register(addr, half, &Default::default()) }.unwrap();
    }
    let batches: Vec<Batch> =
        (0..20).map(|_| pair.start(Op::Read, &local, pair.remote.addr(), local.len())).collect();
    pair.initiator.unregister(local.addr() + half).unwrap();
    local.write(half as usize, &vec![9; half as usize]);
    let quiet = local.read(half as usize, half as usize);
    assert!(
        batches.iter().all(|b| b.wait().is_ok() || b.result().unwrap().unwrap_err().code() == 15)
    );
    assert!(local.read(half as usize, half as usize) == quiet);
}

#[test]
fn a_large_batch_does_not_wait_for_ever_behind_small_ones() {
    let mut config = Config::default();
    config.queue_bytes = 64 << 10;
    let pair = Pair::with(1 << 20, config);
    let local = HostBuffer::zeroed(1 << 20).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let row: Vec<_> = (0..64)
                        .map(|i| {
                            local
                                .request(Op::Write, i * 64, pair.remote.addr() + i as u64 * 64, 64)
                                .unwrap()
                        })
                        .collect();
                    pair.segment
                        .submit_owned(&row, SubmitOptions::default())
                        .unwrap()
                        .wait()
                        .unwrap();
                }
            });
        }
        let row: Vec<_> = (0..5000)
            .map(|i| {
                local.request(Op::Write, i * 64, pair.remote.addr() + i as u64 * 64, 64).unwrap()
            })
            .collect();
        let (result, took) = timed(|| pair.segment.submit_owned(&row, within(ms(20_000))));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        result.unwrap().wait().unwrap();
        assert!(took < 2 * PROMPT, "{took:?}");
    });
}
