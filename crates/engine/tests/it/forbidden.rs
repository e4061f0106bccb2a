//! In containers that forbid a process to touch memory by `process_vm_readv` and `process_vm_writev`, even its own.
#![expect(unsafe_code, reason = "a filter for system calls, and memory that is not registered")]

use tensorferry::{HostBuffer, Op, RegisterOptions, Request, SubmitOptions};

use crate::common::{Pair, alone, buffer, engine, lanes, pattern, says, start};

/// Forbids both calls to this thread, and to those that it starts from now on.
fn forbid() {
    let op = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let program = [
        op(0x20, 0, 0, 0), // load the number of the call
        op(0x15, 2, 0, libc::SYS_process_vm_readv as u32),
        op(0x15, 1, 0, libc::SYS_process_vm_writev as u32),
        op(0x06, 0, 0, libc::SECCOMP_RET_ALLOW),
        op(0x06, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
    ];
    let filter = libc::sock_fprog { len: 5, filter: program.as_ptr().cast_mut() };
    // SAFETY: plain numbers.
    let rc = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(rc, 0);
    let mode = libc::SECCOMP_MODE_FILTER;
    // SAFETY: the filter and its program live during the call, which copies them.
    let rc = unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn calls_that_a_container_forbids_are_not_needed_for_registered_memory() {
    alone("forbidden::calls_that_are_forbidden");
}

#[test]
#[ignore = "forbids calls to the whole process, so it is started by itself"]
fn calls_that_are_forbidden() {
    forbid();
    let pair = Pair::with(1 << 20, lanes(2, 2));
    let local = buffer(&pattern(1 << 20, 1));
    pair.initiator.register_buffer(&local, &RegisterOptions::default()).unwrap();
    start(&pair.segment, Op::Write, &local, pair.remote.addr()).wait().unwrap();
    assert!(pair.remote.read(0, 1 << 20) == pattern(1 << 20, 1));
    let unregistered = HostBuffer::zeroed(1 << 20).unwrap();
    start(&pair.segment, Op::Read, &unregistered, pair.remote.addr()).wait().unwrap();
    assert!(unregistered.read(0, 1 << 20) == pattern(1 << 20, 1));
    // Memory that is not there is told from memory that is.
    // SAFETY: the engine refuses it, and touches nothing.
    let error = unsafe { pair.initiator.register(4096, 64, &RegisterOptions::default()) };
    assert_eq!(error.unwrap_err().code(), 26);
    // SAFETY: as above.
    let batch = unsafe {
        let request = Request { op: Op::Write, local: 4096, remote: pair.remote.addr(), len: 64 };
        pair.segment.submit(vec![request], SubmitOptions::default())
    };
    assert_eq!(batch.unwrap().wait().unwrap_err().code(), 12);
    // Within a process, only what is not registered needs them, and the error says so.
    let e = engine(lanes(1, 1));
    let (own, other) = (HostBuffer::zeroed(4096).unwrap(), buffer(&pattern(4096, 2)));
    e.register_buffer(&own, &RegisterOptions::default()).unwrap();
    let itself = e.segment(e.name()).unwrap();
    let error = start(&itself, Op::Write, &other, own.addr()).wait().unwrap_err();
    says(&error, &["process_vm_writev", "register it"]);
    e.register_buffer(&other, &RegisterOptions::default()).unwrap();
    start(&itself, Op::Write, &other, own.addr()).wait().unwrap();
    assert!(own.read(0, 4096) == pattern(4096, 2));
}
