//! Questions to a peer's control port. An IO thread asks them; nobody blocks but who waits for the answer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use tensorferry_metadata::SegmentName;
use tensorferry_wire::{
    Frame, FrameKind, MessageType, Notification, SegmentDescriptor, WireError, encode_frame,
    is_notify_success, is_probe_success, probe_request,
};

use crate::clock;
use crate::control::Question;
use crate::core::Core;
use crate::error::{Error, Result};
use crate::io::Command;
use crate::peer::Route;

/// How long a peer that was reached may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The question for a peer's descriptor. `answer` is called once, on an IO thread.
pub(crate) fn descriptor_question(
    peer: &Arc<str>,
    name: &SegmentName,
    stop: impl Fn() -> bool + Send + Sync + 'static,
    answer: impl FnOnce(Result<Frame>) + Send + 'static,
) -> Question {
    let request = encode_frame(FrameKind::Typed(MessageType::Metadata), b"{}\n");
    let until = clock::now() + ANSWER_TIMEOUT;
    Question::new((peer, name), "descriptor", request, until, stop, answer).repeatable()
}

/// Reads the answer to [`descriptor_question`]; that takes long if it is long.
pub(crate) fn read_descriptor(peer: &Arc<str>, frame: &Frame) -> Result<SegmentDescriptor> {
    let descriptor = SegmentDescriptor::parse(&frame.body)
        .map_err(|fault| bad_answer(peer, "descriptor", fault))?;
    if descriptor.tcp_data_port == 0 {
        let what = "the descriptor has no tcp_data_port, expected 1 to 65535".to_owned();
        return Err(bad_answer(peer, "descriptor", WireError::Shape { what }));
    }
    Ok(descriptor)
}

/// The host of a peer's data port, and whether it is the one that the user named.
pub(crate) fn data_host<'a>(
    descriptor: &'a SegmentDescriptor,
    name: &'a SegmentName,
) -> (&'a str, bool) {
    let host = descriptor.tcp_data_host.as_deref().unwrap_or(&name.host);
    (host, host == name.host)
}

/// The route to a peer whose data port was looked up.
pub(crate) fn data_route(
    core: &Core,
    peer: &Arc<str>,
    asked: Instant,
    descriptor: &SegmentDescriptor,
    found: Result<Vec<SocketAddr>>,
) -> Result<Route> {
    let addrs = found.map_err(|error| match error {
        Error::Closed => error,
        _ => Error::PeerUnreachable {
            peer: Arc::clone(peer),
            what: format!("looking up the host of its data port failed: {error}"),
            after: clock::since(asked),
            subject: None,
        },
    })?;
    Ok(Route::new(descriptor, addrs, core.config.newest_version, asked))
}

/// Asks a peer's control port whether it is alive, and waits for the answer.
pub(crate) fn probe(core: &Core, peer: &Arc<str>, name: &SegmentName) -> Result<()> {
    let request = encode_frame(FrameKind::Typed(MessageType::Probe), probe_request());
    let until = clock::now() + ANSWER_TIMEOUT;
    let frame = ask_and_wait(core, |answer| {
        Question::new((peer, name), "probe", request, until, || false, answer).repeatable()
    })?;
    if is_probe_success(&frame.body) {
        return Ok(());
    }
    let what = "the answer does not say success".to_owned();
    Err(bad_answer(peer, "probe", WireError::Shape { what }))
}

/// The question that delivers a notification. `answer` is called once, on an IO thread.
pub(crate) fn notify_question(
    (peer, name): (&Arc<str>, &SegmentName),
    notification: &Notification,
    deadline: Instant,
    stop: impl Fn() -> bool + Send + Sync + 'static,
    answer: impl FnOnce(Result<()>) + Send + 'static,
) -> Question {
    let request = encode_frame(FrameKind::Typed(MessageType::Notify), &notification.to_json());
    let named = Arc::clone(peer);
    let read = move |frame: Result<Frame>| {
        let failed = |why: String| Error::NotifyFailed { peer: named, why };
        answer(match frame {
            Ok(frame) if is_notify_success(&frame.body) => Ok(()),
            Ok(_) => Err(failed("its answer does not say success".to_owned())),
            Err(error) => Err(failed(error.to_string())),
        });
    };
    Question::new((peer, name), "notify", request, deadline, stop, read)
}

/// Sends a notification and waits for its acknowledgement.
pub(crate) fn notify(
    core: &Arc<Core>,
    to: (&Arc<str>, &SegmentName),
    notification: &Notification,
    deadline: Instant,
) -> Result<()> {
    ask_and_wait(core, |answer| notify_question(to, notification, deadline, || false, answer))
}

/// Has the first IO thread ask, and waits: a question is answered by its deadline, whatever becomes of it.
fn ask_and_wait<T: Send + 'static>(
    core: &Core,
    question: impl FnOnce(Box<dyn FnOnce(Result<T>) + Send>) -> Question,
) -> Result<T> {
    let (tell, told) = sync_channel(1);
    let question = question(Box::new(move |answer| drop(tell.send(answer))));
    core.mailboxes[0].post(Command::Ask(Arc::new(question)));
    told.recv().unwrap_or(Err(Error::Closed))
}

fn bad_answer(peer: &Arc<str>, what: &'static str, fault: WireError) -> Error {
    Error::BadAnswer { subject: None, peer: Arc::clone(peer), what, fault }
}
