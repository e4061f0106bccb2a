//! Resolvers that hang. The test program's own `getaddrinfo` stands in the place of the system's: hosts that begin with
//! `hang.` are never found, all others are looked up as ever.
#![expect(unsafe_code, reason = "a function of the C library")]

use std::ffi::{CStr, c_char, c_int};
use std::sync::Mutex;
use std::time::Duration;

use tensorferry::{Batch, BatchState, Engine, HostBuffer, Notification, Op};

use crate::common::{
    PROMPT, engine, eventually, lanes, ms, promptly, says, start, start_within, timed,
};
use crate::fake::{BASE, Fake};

type Lookup = unsafe extern "C" fn(
    *const c_char,
    *const c_char,
    *const libc::addrinfo,
    *mut *mut libc::addrinfo,
) -> c_int;

/// The hosts that are being looked up and will not be found.
static HANGING: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const libc::addrinfo,
    result: *mut *mut libc::addrinfo,
) -> c_int {
    if !node.is_null() {
        // SAFETY: the caller passes a string.
        let host = unsafe { CStr::from_ptr(node) }.to_string_lossy();
        if host.starts_with("hang.") {
            HANGING.lock().unwrap().push(host.into_owned());
            // Longer than any test.
            std::thread::sleep(Duration::from_secs(60));
            return libc::EAI_AGAIN;
        }
    }
    // SAFETY: a name that the C library has.
    let real = unsafe { libc::dlsym(libc::RTLD_NEXT, c"getaddrinfo".as_ptr()) };
    // SAFETY: that is its type.
    let real: Lookup = unsafe { std::mem::transmute(real) };
    // SAFETY: the caller's word is passed on.
    unsafe { real(node, service, hints, result) }
}

/// How many look-ups of hosts that end so hang.
fn hanging(end: &str) -> usize {
    HANGING.lock().unwrap().iter().filter(|host| host.ends_with(end)).count()
}

fn write_to(e: &Engine, name: &str, timeout: Duration) -> Batch {
    let segment = e.segment(name).unwrap();
    start_within(&segment, Op::Write, &HostBuffer::zeroed(64).unwrap(), BASE, timeout)
}

#[test]
fn a_resolver_that_hangs_holds_nobody_past_a_deadline() {
    for io_threads in [1, 2] {
        let mut config = lanes(1, io_threads);
        config.transfer_timeout = ms(300);
        let e = engine(config.clone());
        promptly(ms(800), "a batch", || {
            let (result, took) = timed(|| write_to(&e, "hang.deadline:1", ms(300)).wait());
            let error = result.unwrap_err();
            assert_eq!(error.code(), 13, "{error}");
            assert!(took >= ms(300), "{took:?}");
            took
        });
        let note = Notification::new("n", "m");
        let segment = e.segment("hang.deadline:2").unwrap();
        promptly(ms(800), "a notification", || {
            let (result, took) = timed(|| segment.notify(&note));
            let error = result.unwrap_err();
            says(&error, &["hang.deadline:2", "finding its control port took too long"]);
            assert!(took >= ms(300), "{took:?}");
            took
        });
        let batch = write_to(&e, "hang.deadline:3", ms(8000));
        let ((), took) = timed(|| batch.cancel());
        assert!(took < PROMPT, "{took:?}");
        promptly(ms(1000), "closing", || {
            let e = engine(config.clone());
            let batch = write_to(&e, "hang.deadline:3", ms(8000));
            let ((), took) = timed(|| e.close());
            assert_eq!(batch.poll(), BatchState::Failed);
            took
        });
    }
}

#[test]
fn the_host_of_a_data_port_is_looked_up_within_the_deadline_too() {
    let fake = Fake::new(|mut link| link.serve());
    fake.publish(|d| d.tcp_data_host = Some("hang.data".into()));
    let e = engine(lanes(1, 1));
    promptly(ms(2500), "a batch", || {
        let (result, took) = timed(|| write_to(&e, &fake.name(), ms(2000)).wait());
        assert_eq!(result.unwrap_err().code(), 13);
        assert!(took >= ms(2000), "{took:?}");
        took
    });
    assert_eq!(hanging("hang.data"), 1);
    // Nobody waits for ever, nor does the engine's end.
    let segment = e.segment(&fake.name()).unwrap();
    let asking = std::thread::spawn(move || segment.buffers().map(|_| ()));
    eventually("it is asked", || fake.asked() == 1);
    e.close();
    assert_eq!(asking.join().unwrap().unwrap_err().code(), 23);
}

#[test]
fn a_host_that_cannot_be_found_holds_up_nobody_who_has_another() {
    let e = engine(lanes(1, 2));
    let fakes: Vec<Fake> = (0..3).map(|_| Fake::new(|mut link| link.serve())).collect();
    // More peers on one host than names are looked up at once.
    let stuck: Vec<Batch> =
        (1..30).map(|port| write_to(&e, &format!("hang.one:{port}"), ms(8000))).collect();
    eventually("it is looked up", || hanging("hang.one") == 1);
    let local = fakes[0].name().replace("127.0.0.1", "localhost");
    write_to(&e, &local, ms(8000)).wait().unwrap();
    assert_eq!(hanging("hang.one"), 1, "once for all");
    // Names that can be found wait now; addresses do not.
    let more: Vec<Batch> =
        (0..10).map(|i| write_to(&e, &format!("hang.{i}.many:1"), ms(8000))).collect();
    eventually("as many as can be are looked up", || hanging(".many") == 7);
    for fake in &fakes[1..] {
        let segment = e.open(&fake.name()).unwrap();
        start(&segment, Op::Write, &HostBuffer::zeroed(64).unwrap(), BASE).wait().unwrap();
    }
    stuck.iter().chain(&more).for_each(Batch::cancel);
}
