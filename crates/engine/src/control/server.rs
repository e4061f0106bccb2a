//! What the control port answers.

use std::sync::Arc;

use tensorferry_wire::{
    Frame, FrameKind, MessageType, Notification, check_connection_request, connection_reply,
    encode_frame, notify_reply, probe_reply,
};

use crate::core::Core;
use crate::log::Kind;

/// The frame that answers `frame`, which came from the host `from`; `None`: it is malformed or cannot be taken, and the connection
/// is closed without an answer, which is what peers understand.
pub(crate) fn reply(core: &Core, from: &str, frame: &Frame) -> Option<Arc<[u8]>> {
    let kind = match frame.kind {
        FrameKind::Typed(kind) => kind,
        FrameKind::Legacy => MessageType::Connection,
    };
    let json = match kind {
        // The body is the asker's own descriptor. Nothing of it is needed, so nothing of it is read.
        MessageType::Metadata => return Some(core.descriptor_frame()),
        MessageType::Probe => Ok(probe_reply()),
        MessageType::Notify => Notification::parse(&frame.body)
            .map_err(|e| e.to_string())
            .and_then(|notification| core.take_in(notification))
            .map(|()| notify_reply()),
        MessageType::Connection => check_connection_request(&frame.body)
            .map_err(|e| e.to_string())
            .map(|()| connection_reply()),
    };
    match json {
        Ok(json) => Some(encode_frame(frame.kind, json).into()),
        Err(why) => {
            core.log.info(Kind::ControlRequest, from, || {
                format!("a {kind:?} request on the control port from {from} is refused: {why}")
            });
            None
        }
    }
}
