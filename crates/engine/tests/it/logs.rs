//! What is logged: one line per fault, few of a flood, and nothing if all is well.

use std::fmt;
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tensorferry::{Config, Engine, Error, HostBuffer, Notification, Op, Request};
use tensorferry_wire::Status;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::common::{
    Pair, engine, eventually, lanes, limit_descriptors, ms, row, start, start_within, within,
};
use crate::fake::{Answer, BASE, Fake, Gate, Link, Raw, control_only, control_request, done};
use crate::faults::dead_port;
use crate::gpu::{MIB, Sim};
use crate::gpu_kit::{Two, apart, end, submit};

/// Every line at INFO and above of the whole process, from the call of [`listen`] on.
#[derive(Clone, Default)]
struct Lines {
    all: Arc<Mutex<Vec<(Level, String)>>>,
    /// Who logs such a line waits until the gate opens.
    stop: Option<(&'static str, Gate)>,
}

fn listen() -> Lines {
    listen_and_stop(None)
}

fn listen_and_stop(stop: Option<(&'static str, Gate)>) -> Lines {
    let lines = Lines { stop, ..Lines::default() };
    tracing::subscriber::set_global_default(lines.clone()).expect("a process of its own");
    lines
}

impl Lines {
    /// What has been logged since the last call.
    fn take(&self) -> Vec<(Level, String)> {
        std::mem::take(&mut *self.all.lock().unwrap())
    }

    fn count(&self, what: &str) -> usize {
        self.all.lock().unwrap().iter().filter(|(_, text)| text.contains(what)).count()
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Message(String);
        impl Visit for Message {
            fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
                if field.name() == "message" {
                    write!(self.0, "{value:?}").unwrap();
                }
            }
        }
        let mut message = Message(String::new());
        event.record(&mut message);
        let stop = self.stop.as_ref().filter(|(what, _)| message.0.contains(what));
        self.all.lock().unwrap().push((*event.metadata().level(), message.0));
        if let Some((_, gate)) = stop {
            gate.wait();
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// One fault: what it is to be called, and what brings it about.
struct Case {
    code: u32,
    op: Op,
    len: usize,
    fault: fn() -> Error,
}

const fn case(code: u32, op: Op, len: usize, fault: fn() -> Error) -> Case {
    Case { code, op, len, fault }
}

/// Twelve faults of twelve kinds.
const CASES: [Case; 12] = [
    case(7, Op::Write, 701, || fails(&format!("127.0.0.1:{}", dead_port()), Op::Write, 701)),
    case(8, Op::Write, 801, || {
        let refuse = |mut link: Link| {
            let header = link.header().unwrap();
            done((link.swallow(header.len), link.status(Status::Rejected)));
        };
        fails(&Fake::new(refuse).name(), Op::Write, 801)
    }),
    case(9, Op::Read, 901, || {
        let fake = Fake::new(|mut link| link.serve());
        fake.publish(|d| d.buffers[0].len = 900);
        fails(&fake.name(), Op::Read, 901)
    }),
    case(10, Op::Read, 1001, || {
        let fake = Fake::new(|mut link| done((link.header(), link.status(Status::Applied))));
        fails(&fake.name(), Op::Read, 1001)
    }),
    case(11, Op::Write, 1101, || {
        fails(&Fake::new(|mut link| done(link.header())).name(), Op::Write, 1101)
    }),
    case(12, Op::Write, 1201, || {
        let fake = Fake::new(|mut link| link.serve());
        let e = engine(lanes(1, 1));
        let segment = e.open(&fake.name()).unwrap();
        let request = Request { op: Op::Write, local: 4096, remote: BASE, len: 1201 };
        submit(&segment, vec![request], within(ms(8000))).unwrap().wait().unwrap_err()
    }),
    case(13, Op::Read, 1301, || {
        let fake = Fake::new(|mut link| link.hang());
        let e = engine(lanes(1, 1));
        let segment = e.open(&fake.name()).unwrap();
        let local = HostBuffer::zeroed(1301).unwrap();
        start_within(&segment, Op::Read, &local, BASE, ms(200)).wait().unwrap_err()
    }),
    case(15, Op::Read, 1501, || {
        let fake = Fake::new(|mut link| link.hang());
        let e = engine(lanes(1, 1));
        let segment = e.open(&fake.name()).unwrap();
        let local = HostBuffer::zeroed(1501).unwrap();
        e.register_buffer(&local, &Default::default()).unwrap();
        let batch = start(&segment, Op::Read, &local, BASE);
        e.unregister(local.addr()).unwrap();
        batch.wait().unwrap_err()
    }),
    case(16, Op::Read, 1601, || {
        let nonsense = |mut link: Link| done((link.header(), link.send(b"HTTP/1.1 400 Bad")));
        fails(&Fake::new(nonsense).name(), Op::Read, 1601)
    }),
    case(17, Op::Write, 1701, || {
        let name = control_only(|mut stream| {
            done(control_request(&mut stream));
            done(stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"));
        });
        fails(&name, Op::Write, 1701)
    }),
    case(28, Op::Write, 2801, || device("sticky", 700, 2801)),
    case(29, Op::Write, 2901, || device("hang", 1, 2901)),
];

/// A request to `peer` that fails.
fn fails(peer: &str, op: Op, len: usize) -> Error {
    let e = engine(lanes(1, 1));
    let segment = e.segment(peer).unwrap();
    start(&segment, op, &HostBuffer::zeroed(len).unwrap(), BASE).wait().unwrap_err()
}

/// A WRITE from a device with a fault.
fn device(fault: &'static str, value: u64, len: usize) -> Error {
    let sim = Sim::cuda();
    let two = Two::with(sim.config(), Config::default());
    let remote = HostBuffer::zeroed(4096).unwrap();
    two.target.register_buffer(&remote, &Default::default()).unwrap();
    let local = sim.alloc(MIB);
    local.lend(&two.initiator);
    two.run(vec![local.request(Op::Write, 0, remote.addr(), 100)]).unwrap();
    sim.control.set(fault, value);
    let request = local.request(Op::Write, 0, remote.addr(), len);
    let error = end(&submit(&two.segment, vec![request], within(ms(2000))).unwrap()).unwrap_err();
    sim.control.set(fault, 0);
    error
}

apart! {
    fn twelve_faults_are_twelve_kinds_and_a_line_each() {
        let lines = listen();
        for Case { code, op, len, fault } in CASES {
            let error = fault();
            assert_eq!(error.code(), code, "{error}");
            let subject = error.subject().unwrap_or_else(|| panic!("{error}"));
            assert_eq!((subject.op, subject.len), (op, len as u64));
            let text = error.to_string();
            let op = if op == Op::Read { "READ" } else { "WRITE" };
            for part in [op, &format!("of {len} bytes"), &subject.peer, " ms after submission"] {
                assert!(text.contains(part), "{part:?} is not in: {text}");
            }
            assert_eq!(error.peer(), Some(&*subject.peer));
            let mut said = lines.take();
            // What is got over, such as a first loss of a connection, is told apart by its level.
            said.retain(|(level, _)| *level <= Level::WARN);
            // A worker whose device hangs says at the engine's end what it leaves behind.
            said.retain(|(_, line)| code != 29 || !line.contains("left to it"));
            assert_eq!(said, [(Level::WARN, text)], "code {code}");
        }
        let mut codes: Vec<u32> = CASES.iter().map(|case| case.code).collect();
        codes.dedup();
        assert_eq!(codes.len(), 12);
    }
}

apart! {
    fn nothing_is_said_when_all_is_well() {
        let lines = listen();
        let mut config = lanes(4, 2);
        config.lane_idle_probe = ms(1);
        let pair = Pair::with(1 << 20, config);
        let local = HostBuffer::zeroed(1 << 20).unwrap();
        for round in 0..20 {
            for op in [Op::Write, Op::Read] {
                let requests = row(op, &local, pair.remote.addr(), 4096, 256);
                let notification = Notification::new("n", "m");
                let options = within(ms(8000)).with_notification(notification);
                pair.segment.submit_owned(&requests, options).unwrap().wait().unwrap();
            }
            // From one round to the next lanes are idle for so long that they are replaced.
            std::thread::park_timeout(ms(3));
            pair.initiator.register_buffer(&local, &Default::default()).unwrap();
            pair.initiator.unregister(local.addr()).unwrap();
            assert_eq!(pair.target.take_notifications().len(), 2, "round {round}");
        }
        // Not what is read here: the target may come to that later, and refuse it.
        let other = HostBuffer::zeroed(4096).unwrap();
        pair.target.register_buffer(&other, &Default::default()).unwrap();
        start(&pair.segment, Op::Read, &local, pair.remote.addr()).cancel();
        pair.target.unregister(other.addr()).unwrap();
        let stats = pair.initiator.stats();
        assert!(stats.reconnects > 0 && stats.lanes_lost == 0, "{stats:?}");
        pair.initiator.close();
        pair.target.close();
        assert_eq!(lines.take(), []);
    }
}

apart! {
    fn what_is_got_over_is_said_at_info() {
        let lines = listen();
        let said = |parts: &[&str]| {
            eventually(parts[0], || lines.count(parts[0]) > 0);
            let all = lines.take();
            assert_eq!(all.len(), 1, "{all:?}");
            assert_eq!(all[0].0, Level::INFO);
            for part in parts {
                assert!(all[0].1.contains(part), "{part:?} is not in: {}", all[0].1);
            }
        };
        let local = HostBuffer::zeroed(100).unwrap();
        // A connection is lost, and its request is sent again.
        let fake = Fake::new(|mut link| if link.number == 0 { done(link.header()) } else { link.serve() });
        let e = engine(lanes(1, 1));
        let segment = e.open(&fake.name()).unwrap();
        start(&segment, Op::Read, &local, BASE).wait().unwrap();
        said(&["was lost", &fake.name(), "closed the connection", "1 requests are sent again"]);
        // A peer has moved.
        let (old, new) = (fake.data_port(), { fake.move_data_port(|mut link| link.serve()); fake.data_port() });
        drop(segment.buffers());
        said(&["has moved its data port", &fake.name(), &old.to_string(), &new.to_string()]);
        // A peer comes back.
        fake.publish(|d| d.tcp_data_port = dead_port());
        let again = engine(lanes(1, 1));
        let segment = again.open(&fake.name()).unwrap();
        assert_eq!(start(&segment, Op::Read, &local, BASE).wait().unwrap_err().code(), 7);
        assert_eq!(lines.take().len(), 1);
        fake.publish(|d| d.tcp_data_port = new);
        start(&segment, Op::Read, &local, BASE).wait().unwrap();
        said(&["can be reached again, after", &fake.name()]);
        // Strangers at both ports of a target, and a range that is not registered there.
        let mut raw = Raw::connect(e.data_port());
        raw.send(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n");
        said(&["data connection from 127.0.0.1:", "is closed"]);
        let mut raw = Raw::connect(e.control_port());
        raw.send(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n");
        said(&["control connection from 127.0.0.1:", "is closed"]);
        let mut raw = Raw::connect(e.data_port());
        raw.ask(0x1000, 77);
        said(&["READ of 77 bytes at 0x1000 from 127.0.0.1:", "is refused"]);
    }
}

apart! {
    fn a_flood_of_failures_is_few_lines_and_hides_no_other_peer() {
        let lines = listen();
        let e = engine(lanes(1, 1));
        let local = HostBuffer::zeroed(100).unwrap();
        let names = [0; 2].map(|_| format!("127.0.0.1:{}", dead_port()));
        let noisy = e.segment(&names[0]).unwrap();
        for _ in 0..300 {
            assert_eq!(start(&noisy, Op::Write, &local, BASE).wait().unwrap_err().code(), 7);
        }
        let quiet = e.segment(&names[1]).unwrap();
        assert_eq!(start(&quiet, Op::Write, &local, BASE).wait().unwrap_err().code(), 7);
        assert!(lines.count(&names[0]) < 10, "{}", lines.count(&names[0]));
        assert_eq!(lines.count(&names[1]), 1);
    }
}

apart! {
    fn an_io_thread_that_is_held_up_delays_nobody_who_looks() {
        let gate = Gate::default();
        let lines = listen_and_stop(Some(("no answer came", gate.clone())));
        let opened = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&opened);
        let fake = Fake::new(move |mut link| {
            count.fetch_add(1, Ordering::SeqCst);
            link.header();
        });
        let e: Engine = engine(lanes(1, 1));
        let segment = e.open(&fake.name()).unwrap();
        let batch = start(&segment, Op::Write, &HostBuffer::zeroed(100).unwrap(), BASE);
        eventually("the thread is held up in a subscriber", || lines.count("no answer came") > 0);
        let begin = std::time::Instant::now();
        let peers = e.peers();
        let took = begin.elapsed();
        assert!(took >= ms(200) && took < Duration::from_secs(3), "{took:?}");
        assert!(!peers[0].lanes_known && peers[0].lanes.is_empty());
        gate.open();
        assert_eq!(batch.wait().unwrap_err().code(), 11);
        eventually("it answers again", || e.peers()[0].lanes_known);
        assert_eq!(opened.load(Ordering::SeqCst), 1);
    }
}

apart! {
    fn running_out_of_descriptors_is_one_line() {
        let lines = listen();
        let target = engine(lanes(1, 1));
        let used = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64 - 1;
        let is_free = |fd: &u64| !std::path::Path::new(&format!("/proc/self/fd/{fd}")).exists();
        let free = (0..used + 64).find(is_free).unwrap();
        // The client takes the last one, so that there is none for its other end.
        limit_descriptors(free + 1);
        let mut client = Raw::connect(target.data_port());
        eventually("it is said", || lines.count("accepting a connection failed") > 0);
        // The listener tries again ten times a second.
        std::thread::park_timeout(ms(350));
        limit_descriptors(1024);
        client.ask(4096, 1);
        assert_eq!(client.answer(), Answer::Rejected);
        let said = lines.take();
        assert_eq!(said.iter().filter(|(level, _)| *level <= Level::WARN).count(), 1, "{said:?}");
        assert!(said[0].1.contains("Too many open files"), "{said:?}");
    }
}

apart! {
    fn a_device_that_fails_at_the_target_is_one_line_there() {
        let lines = listen();
        let sim = Sim::cuda();
        let two = Two::with(Config::default(), sim.config());
        let remote = sim.alloc(MIB);
        remote.lend(&two.target);
        let local = HostBuffer::zeroed(1000).unwrap();
        start(&two.segment, Op::Read, &local, remote.addr).wait().unwrap();
        // Which library is used.
        assert_eq!(lines.take().len(), 1);
        sim.control.set("sticky", 700);
        let error = start(&two.segment, Op::Read, &local, remote.addr).wait().unwrap_err();
        // The refusal may be here before it is logged there.
        eventually("the target says so", || lines.count("a READ from") > 0);
        let said = lines.take();
        sim.control.set("sticky", 0);
        let warnings = |part: &str| {
            said.iter().filter(|(level, text)| *level == Level::WARN && text.contains(part)).count()
        };
        assert_eq!((warnings(""), warnings(&error.to_string())), (2, 1), "{said:?}");
        // By its address, if it has not hung up meanwhile.
        assert_eq!(warnings("a READ from "), 1, "{said:?}");
    }
}
