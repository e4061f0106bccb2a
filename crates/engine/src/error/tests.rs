//! The page of errors says what the errors say.

use super::*;

const PAGE: &str = include_str!("../../../../docs/errors.md");

fn subject(op: Op) -> Box<Subject> {
    Box::new(Subject {
        peer: "10.0.0.2:15773".into(),
        op,
        local: 0x7f11_c000_0000,
        remote: 0x7f3a_4000_1000,
        len: 4096,
        elapsed: Duration::from_micros(12_300),
    })
}

/// One of each kind, as it can happen.
fn samples() -> Vec<Error> {
    let (addr, len) = (0x7f3a_4000_0000, 1 << 20);
    let peer = || Arc::<str>::from("10.0.0.2:15773");
    let why = || "the peer closed the connection".to_owned();
    let device = DeviceId::new(tensorferry_gpu::Vendor::Cuda, 0);
    vec![
        Error::Config(ConfigError {
            name: "TENSORFERRY_IO_THREADS".into(),
            value: "many".into(),
            expected: "a count from 1 to 64",
        }),
        Error::Name(MetadataError::Unresolved {
            host: "worker-7".into(),
            reason: "Name or service not known".into(),
        }),
        Error::bad_argument(
            "request 3 (local 0x0, remote 0x7f3a40001000, 4096 bytes): an address is null; nothing was sent",
        ),
        Error::Overlap { addr, len, other_addr: addr + 4096, other_len: 4096 },
        Error::NotRegistered { addr },
        Error::StillInUse { addr, len, waited: Duration::from_millis(1000) },
        Error::PeerUnreachable {
            subject: Some(subject(Op::Write)),
            peer: peer(),
            what: "connecting to its control port at 10.0.0.2:15773 failed (Connection refused (os error 111))"
                .into(),
            after: Duration::from_micros(900),
        },
        Error::Refused(subject(Op::Write)),
        Error::RangeNotPublished(subject(Op::Read)),
        Error::ConnectionLost { subject: subject(Op::Read), why: why() },
        Error::OutcomeUnknown { subject: subject(Op::Write), why: why() },
        Error::BadLocalAddress { subject: subject(Op::Write), gpus: String::new() },
        Error::TimedOut { subject: subject(Op::Write), stage: "its answer had not come", sent: true },
        Error::Cancelled { subject: subject(Op::Read), sent: false },
        Error::Unregistered(subject(Op::Read)),
        Error::Protocol {
            subject: subject(Op::Read),
            peer_addr: ([10, 0, 0, 2], 15_774).into(),
            fault: WireError::NotAStatus,
        },
        Error::BadAnswer {
            subject: Some(subject(Op::Write)),
            peer: peer(),
            what: "descriptor",
            fault: WireError::FrameLength { len: 4_707_766_217_222_636_628, limit: 16 << 20 },
        },
        Error::NotifyFailed { peer: peer(), why: "its answer does not say success".into() },
        Error::NotifyTooLarge { len: 2_097_201, limit: 1 << 20 },
        Error::Busy { peer: peer(), queued: 16 << 20, limit: 16 << 20 },
        Error::PortsExhausted {
            range: "15000-15001".parse().unwrap(),
            address: "10.0.0.1".into(),
            why: "Address already in use (os error 98)".into(),
        },
        Error::UnknownBatch { id: 4_294_967_296 },
        Error::Closed,
        Error::ForkedProcess { parent: 4711 },
        Error::io("making a poller (epoll)", io::Error::from_raw_os_error(24)),
        Error::Unmapped { addr, len, at: addr, readable: false, gpus: String::new() },
        Error::Gpu(Box::new(GpuError::NoSuchDevice {
            device: DeviceId::new(tensorferry_gpu::Vendor::Cuda, 8),
            file: "libcuda.so.1".into(),
            count: 8,
        })),
        Error::DeviceCopy {
            subject: subject(Op::Write),
            why: "copying from cuda:0: cuMemcpyDtoHAsync_v2 answered 700 CUDA_ERROR_ILLEGAL_ADDRESS".into(),
        },
        Error::DeviceStuck { subject: Some(subject(Op::Write)), device },
        Error::NoDeviceAnswer { device },
        Error::WrongLocation { addr, len, named: "cuda:0".into(), found: "host memory".into() },
        Error::Reallocated { addr, len },
        Error::StreamCaptured { stream: 0x55d0_c0de, device },
    ]
}

/// Does not compile when there is a new kind of error: add one of it to [`samples`], and a section to the page.
fn is_known(error: &Error) {
    match error {
        Error::Config(_)
        | Error::Name(_)
        | Error::BadArgument { .. }
        | Error::Overlap { .. }
        | Error::NotRegistered { .. }
        | Error::StillInUse { .. }
        | Error::PeerUnreachable { .. }
        | Error::Refused(_)
        | Error::RangeNotPublished(_)
        | Error::ConnectionLost { .. }
        | Error::OutcomeUnknown { .. }
        | Error::BadLocalAddress { .. }
        | Error::TimedOut { .. }
        | Error::Cancelled { .. }
        | Error::Unregistered(_)
        | Error::Protocol { .. }
        | Error::BadAnswer { .. }
        | Error::NotifyFailed { .. }
        | Error::NotifyTooLarge { .. }
        | Error::Busy { .. }
        | Error::PortsExhausted { .. }
        | Error::UnknownBatch { .. }
        | Error::Closed
        | Error::ForkedProcess { .. }
        | Error::Io { .. }
        | Error::Unmapped { .. }
        | Error::Gpu(_)
        | Error::DeviceCopy { .. }
        | Error::DeviceStuck { .. }
        | Error::NoDeviceAnswer { .. }
        | Error::WrongLocation { .. }
        | Error::Reallocated { .. }
        | Error::StreamCaptured { .. } => {}
    }
}

/// The part of the page below a heading of the second level.
fn section(heading: &str) -> Option<&'static str> {
    let begin = PAGE.find(&format!("\n## {heading}\n"))? + 1;
    let rest = &PAGE[begin + 3..];
    Some(&rest[..rest.find("\n## ").unwrap_or(rest.len())])
}

#[test]
fn every_error_is_on_its_page_as_it_is() {
    for (i, error) in samples().iter().enumerate() {
        is_known(error);
        assert_eq!(error.code(), i as u32 + 1, "{error}: one of each, in the order of their codes");
        let heading = format!("{} {}", error.code(), error.name());
        let text = section(&heading).unwrap_or_else(|| panic!("no section {heading:?}"));
        let example = format!("```text\n{error}\n```");
        assert!(text.contains(&example), "{heading}: the example is not\n{example}");
        let retry = if error.is_retryable() { "**Try again**: yes" } else { "**Try again**: no" };
        assert!(text.contains(retry), "{heading}: {retry} is not there");
        for part in ["**Bytes**: ", "**What to do**: "] {
            assert!(text.contains(part), "{heading}: {part} is not there");
        }
    }
}

#[test]
fn the_page_has_no_error_that_does_not_exist() {
    let known: Vec<String> =
        samples().iter().map(|e| format!("{} {}", e.code(), e.name())).collect();
    let headings = PAGE.lines().filter_map(|line| line.strip_prefix("## "));
    let numbered = headings.filter(|heading| heading.starts_with(|c: char| c.is_ascii_digit()));
    assert_eq!(numbered.collect::<Vec<_>>(), known);
}
