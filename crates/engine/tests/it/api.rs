//! What users of the crate may count on, whatever they do with it.

use std::collections::HashSet;
use std::error::Error as StdError;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use tensorferry::{
    Access, Batch, BatchId, BatchState, BatchTable, BufferInfo, Completion, Config, ConfigError,
    DeviceBuffer, Engine, Error, HostBuffer, LaneStats, Notification, OnFull, Op, OwnedRequest,
    PeerStats, RegisterOptions, Repeat, Request, Segment, Stats, SubmitOptions, UserStream,
};

#[path = "../../examples/async.rs"]
mod awaits;

/// Compiles for what may be sent to, and used by, any thread, and shown in a log.
fn handle<T: Send + Sync + Debug + 'static>() {}

fn cloned<T: Clone>() {}

fn key<T: Copy + Eq + Hash>() {}

#[test]
fn handles_may_be_used_from_any_thread() {
    handle::<Engine>();
    handle::<Segment>();
    handle::<Batch>();
    handle::<Completion>();
    handle::<BatchTable>();
    handle::<HostBuffer>();
    handle::<DeviceBuffer>();
    handle::<OwnedRequest>();
    handle::<UserStream>();
    handle::<Config>();
    handle::<SubmitOptions>();
    handle::<PeerStats>();
    handle::<LaneStats>();
    handle::<Stats>();
}

#[test]
fn what_costs_little_can_be_cloned_and_what_is_plain_can_be_a_key() {
    cloned::<Engine>();
    cloned::<Segment>();
    cloned::<Batch>();
    cloned::<HostBuffer>();
    cloned::<DeviceBuffer>();
    cloned::<OwnedRequest>();
    cloned::<Error>();
    key::<BatchId>();
    key::<BatchState>();
    key::<BufferInfo>();
    key::<Request>();
    key::<RegisterOptions>();
    key::<OnFull>();
    key::<Access>();
    key::<Repeat>();
    key::<Op>();
    let ids: HashSet<BatchId> = [1, 2, 1].map(BatchId::from_raw).into();
    assert_eq!(ids.len(), 2);
}

#[test]
fn errors_travel_as_errors_do() {
    fn boxed<E: StdError + Send + Sync + 'static>(error: E) -> Box<dyn StdError + Send + Sync> {
        Box::new(error)
    }
    let vars = [("TENSORFERRY_IO_THREADS".to_owned(), "many".to_owned())];
    let config: ConfigError = Config::from_vars(vars).unwrap_err();
    let text = config.to_string();
    assert_eq!(
        text,
        "TENSORFERRY_IO_THREADS=many: expected a count from 1 to 64; correct it or unset it"
    );
    let error = Error::from(config);
    assert_eq!((error.code(), error.name(), error.to_string()), (1, "Config", text));
    let boxed = boxed(error);
    assert_eq!(boxed.downcast_ref::<Error>().map(Error::code), Some(1));
    let shared: Arc<dyn StdError + Send + Sync> = boxed.into();
    assert!(!shared.to_string().is_empty());
}

#[test]
fn options_are_what_was_said_and_otherwise_the_default() {
    let note = Notification::new("n", "m");
    let options = SubmitOptions::default()
        .with_on_full(OnFull::Refuse)
        .with_timeout(Duration::from_secs(3))
        .with_notification(note.clone());
    assert_eq!((options.on_full, options.timeout), (OnFull::Refuse, Some(Duration::from_secs(3))));
    assert_eq!((options.notification, options.stream), (Some(note), None));
    let options = RegisterOptions::default().with_repeat(Repeat::Refused);
    assert_eq!((options.repeat, options.access), (Repeat::Refused, Access::default()));
    assert_eq!(Request::read(1, 2, 3), Request { op: Op::Read, local: 1, remote: 2, len: 3 });
    assert_eq!(Request::write(1, 2, 3), Request { op: Op::Write, local: 1, remote: 2, len: 3 });
}

/// The example is a program of its own, too; here it is run.
#[test]
fn awaiting_needs_no_runtime() {
    awaits::main().unwrap();
}
