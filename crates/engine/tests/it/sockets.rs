//! What connections may cost: descriptors, and memory for those who do not take their answers.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use tensorferry::{Config, HostBuffer, Op, RegisterOptions};

use crate::common::{
    Beside, alone, engine, eventually, lanes, limit_descriptors, ms, resident, start, tell, timed,
    until_dismissed,
};
use crate::fake::{BASE, Fake, Raw, done, vanish};

const CLIENTS: usize = 200;
const DESCRIPTORS: u64 = 64;

#[test]
#[ignore = "started by the tests that need a process with few descriptors"]
fn a_receiver_with_few_descriptors() {
    limit_descriptors(DESCRIPTORS);
    let e = engine(Config::default());
    let memory = HostBuffer::zeroed(4096).unwrap();
    e.register_buffer(&memory, &RegisterOptions::default()).unwrap();
    tell(&[e.data_port().into(), e.control_port().into(), memory.addr()]);
    until_dismissed();
}

struct Receiver {
    process: Beside,
    data: u16,
    control: u16,
    addr: u64,
}

impl Receiver {
    fn start() -> Self {
        let mut process = Beside::start("sockets::a_receiver_with_few_descriptors");
        let told = process.told();
        Self { process, data: told[0] as u16, control: told[1] as u16, addr: told[2] }
    }
}

fn is_answered(client: &mut Raw) -> bool {
    client.stream.set_nonblocking(true).unwrap();
    let n = client.stream.peek(&mut [0; 9]);
    client.stream.set_nonblocking(false).unwrap();
    match n {
        Ok(n) => n == 9,
        Err(e) if e.kind() == ErrorKind::WouldBlock => false,
        Err(e) => panic!("whoever waits is not hung up on: {e}"),
    }
}

#[test]
fn more_clients_than_descriptors_wait_and_are_served_when_others_leave() {
    let receiver = Receiver::start();
    let mut clients: Vec<Raw> = (0..CLIENTS)
        .map(|_| {
            let mut client = Raw::connect(receiver.data);
            client.ask(receiver.addr, 1);
            client
        })
        .collect();
    let served = |clients: &mut [Raw]| {
        clients.iter_mut().filter_map(|c| is_answered(c).then_some(())).count()
    };
    eventually("as many as there is room for", || served(&mut clients) >= 32);
    // It neither runs out nor busies itself with those that wait, and its other port answers.
    let (before, begin) = (receiver.process.ticks(), Instant::now());
    let other = engine(Config::default());
    other.probe(&format!("127.0.0.1:{}", receiver.control)).unwrap();
    eventually("a second", || begin.elapsed() > ms(1000));
    let spent = receiver.process.ticks() - before;
    assert!(spent < 20, "busy for {spent} hundredths of a second");
    let mut left = CLIENTS;
    while left > 0 {
        let n = served(&mut clients);
        assert!(n < DESCRIPTORS as usize, "{n} at once");
        clients.retain_mut(|client| !is_answered(client));
        let room = left - clients.len();
        left = clients.len();
        if room == 0 {
            eventually("the next are served", || served(&mut clients) > 0);
        }
    }
}

#[test]
fn clients_that_never_ask_for_anything_keep_nobody_out() {
    let receiver = Receiver::start();
    let mut idle: Vec<TcpStream> =
        (0..CLIENTS / 2).map(|_| Raw::connect(receiver.data).stream).collect();
    let mut client = Raw::connect(receiver.data);
    client.ask(receiver.addr, 1);
    client.stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    client.stream.read_exact(&mut [0; 9]).unwrap();
    // It was not those that were there first who kept their places.
    idle[0].set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(idle[0].read(&mut [0]).unwrap(), 0);
    // One that is served is not taken for one of them.
    client.ask(receiver.addr, 1);
    client.stream.read_exact(&mut [0; 9]).unwrap();
}

/// Were newcomers refused, whoever holds connections without a word could keep everybody out.
#[test]
fn a_crowd_at_the_control_port_keeps_nobody_out() {
    let receiver = Receiver::start();
    let initiator = engine(Config::default());
    let name = format!("127.0.0.1:{}", receiver.control);
    let mut crowd = Vec::new();
    let ((), took) = timed(|| {
        for _ in 0..5 {
            for i in 0..DESCRIPTORS {
                let mut stranger = Raw::connect(receiver.control).stream;
                // It may have had to make room before it has said a word.
                done(stranger.write_all(&[9, 0, 0][..(i % 3) as usize]));
                crowd.push(stranger);
            }
            initiator.probe(&name).unwrap();
        }
        initiator.open(&name).unwrap();
    });
    assert!(took < ms(4000), "strangers had to leave by themselves: {took:?}");
}

#[test]
fn a_connection_that_says_little_costs_little() {
    alone("sockets::connections_that_say_little");
}

/// What an engine may hold for each of them, the kernel's part aside. It is about 1.2 KiB; tables that double are in it.
const LITTLE: u64 = 4 << 10;

#[test]
#[ignore = "counts memory of the process, so it is started by itself"]
fn connections_that_say_little() {
    // Both ends are here, and an engine spares some descriptors.
    limit_descriptors(4096);
    const EACH: usize = 400;
    let e = engine(lanes(1, 1));
    let memory = HostBuffer::zeroed(4096).unwrap();
    e.register_buffer(&memory, &RegisterOptions::default()).unwrap();
    let whole = Raw::header(Op::Read, memory.addr(), 1);
    let crowd = |says: &[u8]| -> Vec<Raw> {
        let open = |_| {
            let mut client = Raw::connect(e.data_port());
            client.send(says);
            client
        };
        (0..EACH).map(open).collect()
    };
    // The first ones cost what all have in common.
    let mut kept = vec![crowd(&whole)];
    kept[0].iter_mut().for_each(|client| drop(client.bytes(9)));
    for (what, says) in [("nothing", &[][..]), ("half a header", &whole[..13]), ("READs", &whole)] {
        let before = (resident(), e.stats().connections_accepted);
        kept.push(crowd(says));
        let all = before.1 + EACH as u64;
        eventually("they are taken", || e.stats().connections_accepted >= all);
        // Whoever comes behind them is served when they have been looked at, by the only thread.
        let mut last = Raw::connect(e.data_port());
        last.ask(memory.addr(), 1);
        last.bytes(9);
        let each = resident().saturating_sub(before.0) / EACH as u64;
        eprintln!("a connection that says {what} costs {each} bytes");
        assert!(each <= LITTLE, "{what}: {each} bytes each");
    }
}

#[test]
fn answers_that_nobody_takes_are_bounded_over_all_connections() {
    alone("sockets::answers_that_nobody_takes");
}

#[test]
#[ignore = "counts memory of the process, so it is started by itself"]
fn answers_that_nobody_takes() {
    let e = engine(lanes(1, 2));
    let memory = HostBuffer::zeroed(1 << 20).unwrap();
    e.register_buffer(&memory, &RegisterOptions::default()).unwrap();
    let header = Raw::header(Op::Read, memory.addr(), 1 << 20);
    let asked = header.repeat(20_000);
    let before = resident();
    let mut clients: Vec<TcpStream> = (0..400)
        .map(|_| {
            let mut client = Raw::connect(e.data_port()).stream;
            client.set_nonblocking(true).unwrap();
            // As much as is taken.
            let _ = client.write(&asked);
            client
        })
        .collect();
    eventually("all are accepted", || e.stats().connections_accepted == 400);
    let most = (0..20).fold(0, |most: u64, _| {
        for client in &mut clients {
            let _ = client.write(&header);
        }
        std::thread::park_timeout(ms(20));
        most.max(resident())
    });
    let grown = most.saturating_sub(before) >> 20;
    assert!(grown < 120, "{grown} MiB for answers");
    // Whoever takes his answers is served as ever.
    drop(clients.split_off(200));
    let mut good = Raw::connect(e.data_port());
    for _ in 0..100 {
        good.ask(memory.addr(), 1);
        good.stream.read_exact(&mut [0; 9]).unwrap();
    }
}

#[test]
fn lanes_that_nobody_uses_make_room_for_new_ones() {
    alone("sockets::lanes_make_room");
}

#[test]
#[ignore = "sets a limit of the process, so it is started by itself"]
fn lanes_make_room() {
    let fakes: Vec<Fake> = (0..30).map(|_| Fake::new(|mut link| link.serve())).collect();
    let e = engine(lanes(1, 2));
    let local = HostBuffer::zeroed(64).unwrap();
    let write = |fake: &Fake| {
        let segment = e.open(&fake.name())?;
        start(&segment, Op::Write, &local, BASE).wait()
    };
    fakes[..20].iter().for_each(|fake| write(fake).unwrap());
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    limit_descriptors(open - 1);
    for fake in &fakes[20..] {
        eventually("there is room", || write(fake).is_ok());
    }
    eventually("one is closed", || fakes[..20].iter().any(|fake| fake.hung_up() == 1));
    limit_descriptors(1024);
    fakes.iter().for_each(|fake| write(fake).unwrap());
}

/// The other side's machine is gone: the connection is not kept for ever, though nothing is read from it.
#[test]
fn a_client_that_goes_without_a_word_is_let_go_in_the_end() {
    alone("sockets::a_client_that_goes");
}

#[test]
#[ignore = "counts descriptors of the process, so it is started by itself"]
fn a_client_that_goes() {
    let mut config = lanes(1, 2);
    config.silence_timeout = ms(500);
    let e = engine(config);
    let memory = HostBuffer::zeroed(64 << 20).unwrap();
    e.register_buffer(&memory, &RegisterOptions::default()).unwrap();
    let mut clients: Vec<Raw> = (0..3).map(|_| Raw::connect(e.data_port())).collect();
    // One is idle, one is owed more than the sockets hold, and one has half a request under way.
    clients[0].ask(memory.addr(), 1);
    clients[0].bytes(9);
    clients[1].ask(memory.addr(), 64 << 20);
    clients[2].send(&Raw::header(Op::Write, memory.addr(), 4096));
    let mut frozen = Raw::connect(e.data_port());
    frozen.ask(memory.addr(), 1);
    frozen.bytes(9);
    clients.iter().for_each(|client| vanish(&client.stream));
    let sockets = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = sockets();
    let until = Instant::now() + Duration::from_secs(30);
    while sockets() > before - 3 {
        assert!(Instant::now() < until, "{} of {before} are left", sockets());
        std::thread::park_timeout(ms(20));
    }
    // One that is only frozen was not taken for gone.
    frozen.ask(memory.addr(), 1);
    frozen.bytes(9);
}
