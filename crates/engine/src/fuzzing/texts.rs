//! What control ports are sent, and answer.

use std::time::Instant;

use tensorferry_metadata::{MetadataServer, PortRange, SegmentName, local_host, resolve_literal};
use tensorferry_wire::{
    Frame, FrameKind, FrameReader, MessageType, Notification, SegmentDescriptor, Version,
    WireError, check_connection_request, encode_frame, is_notify_success, is_probe_success,
};

use crate::fuzzing::Cuts;
use crate::peer::Route;

/// The longest frame that is accepted here; short, so that inputs reach it.
const LIMIT: u64 = 600;
/// The most bytes of an error's text: two quotes of 80 characters, each written as an escape, and what is about them.
const MOST_TEXT: usize = 2000;

/// Frames of a control port, by a stream that is cut somewhere, and by one that is not.
pub fn frames(input: &[u8]) {
    let Some((&seed, stream)) = input.split_first() else { return };
    let whole = read(stream, Cuts::new(0));
    let cut = read(stream, Cuts::new(seed));
    assert_eq!(whole, cut, "cuts make a difference");
    for Frame { kind, body } in whole.0 {
        assert_eq!(read(&encode_frame(kind, &body), Cuts::new(seed)).0.len(), 1);
        match kind {
            FrameKind::Typed(MessageType::Metadata) => describe(&body),
            _ => message(&body),
        }
    }
}

fn read(stream: &[u8], mut cuts: Cuts) -> (Vec<Frame>, Option<WireError>, bool) {
    let (mut reader, mut frames, mut rest) = (FrameReader::new(LIMIT), Vec::new(), stream);
    while !rest.is_empty() {
        let mut piece = &rest[..cuts.next(rest.len())];
        rest = &rest[piece.len()..];
        while !piece.is_empty() {
            match reader.feed(piece) {
                Err(error) => return (frames, Some(error), false),
                Ok((taken, frame)) => {
                    assert!(taken > 0, "nothing was taken");
                    assert!(reader.kept() as u64 <= LIMIT, "more is kept than a frame");
                    frames.extend(frame);
                    piece = &piece[taken..];
                }
            }
        }
    }
    (frames, None, reader.started())
}

/// The body of a notification, of a handshake, or of an answer.
pub fn messages(input: &[u8]) {
    message(input.get(1..).unwrap_or_default());
}

fn message(body: &[u8]) {
    if let Ok(notification) = Notification::parse(body) {
        assert_eq!(Notification::parse(&notification.to_json()), Ok(notification));
    }
    if let Err(error) = check_connection_request(body) {
        check_text(&error);
    }
    let _ = (is_notify_success(body), is_probe_success(body));
}

/// A descriptor, as far as it is used without looking a name up.
pub fn descriptor(input: &[u8]) {
    describe(input.get(1..).unwrap_or_default());
}

fn describe(body: &[u8]) {
    let descriptor = match SegmentDescriptor::parse(body) {
        Ok(descriptor) => descriptor,
        Err(error) => return check_text(&error),
    };
    let again = descriptor.to_json(u64::MAX);
    assert_eq!(again.buffers_written, descriptor.buffers.len());
    assert_eq!(SegmentDescriptor::parse(&again.json).as_ref(), Ok(&descriptor));
    let cut = descriptor.to_json(body.len() as u64);
    let cut_again = SegmentDescriptor::parse(&cut.json).expect("what we write can be read");
    assert_eq!(cut_again.buffers[..], descriptor.buffers[..cut.buffers_written]);
    if let Some(host) = &descriptor.tcp_data_host {
        look_up(host, descriptor.tcp_data_port);
    }
    let route = Route::new(&descriptor, Vec::new(), Version::V2, Instant::now());
    for buffer in descriptor.buffers.iter().take(50) {
        for (addr, len) in [
            (buffer.addr, buffer.len),
            (buffer.addr, buffer.len.saturating_add(1)),
            (buffer.addr - 1, 1),
            (buffer.addr + (buffer.len - 1), 1),
            (buffer.addr + (buffer.len - 1), u64::MAX),
        ] {
            let inside = descriptor.buffers.iter().any(|b| {
                let end = u128::from(b.addr) + u128::from(b.len);
                addr >= b.addr && u128::from(addr) + u128::from(len) <= end
            });
            assert!(!route.covers(addr, len, &mut 0) || inside, "{addr:#x} + {len}");
        }
    }
}

/// An error is a line that can be logged, however long what it is about.
fn check_text(error: &WireError) {
    let text = error.to_string();
    assert!(text.len() < MOST_TEXT, "{} bytes of text", text.len());
    assert!(!text.contains(char::is_control), "{text:?}");
}

/// Names of segments, hosts, ranges of ports: what users and peers write as text.
pub fn names(input: &[u8]) {
    let text = String::from_utf8_lossy(input.get(1..).unwrap_or_default());
    match SegmentName::parse(&text, 12_001) {
        Ok(name) => {
            assert_eq!(SegmentName::parse(&name.to_string(), 1), Ok(name.clone()));
            look_up(&name.host, name.port);
        }
        Err(error) => assert!(error.to_string().len() < MOST_TEXT),
    }
    if let Ok(host) = local_host(&text) {
        look_up(&host, 0);
    }
    let _ = text.parse::<PortRange>();
    let _ = MetadataServer::parse(&text);
}

fn look_up(host: &str, port: u16) {
    if let Some(Err(error)) = resolve_literal(host, port) {
        assert!(error.to_string().len() < MOST_TEXT);
    }
}
