use serde::de::{MapAccess, SeqAccess};
use serde_json::json;

use crate::WireError;
use crate::json::{Contents, Field, Read, read_object};

const TYPE_LEN: u64 = 1;
const SUCCESS: &str = "success";

/// A short message that an initiator leaves with a target, often after a transfer.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub struct Notification {
    /// Free text; peers use it to tell what the message is about.
    pub name: String,
    /// Free text.
    pub message: String,
}

impl Notification {
    /// A message of these two texts.
    #[must_use]
    pub fn new(name: impl Into<String>, message: impl Into<String>) -> Self {
        Self { name: name.into(), message: message.into() }
    }

    /// Writes the body of a notify frame.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        let object = json!({ "name": self.name, "notify_msg": self.message });
        format!("{object}\n").into_bytes()
    }

    /// Reads the body of a notify frame; a missing key is an empty text.
    ///
    /// Bytes that are not UTF-8 become U+FFFD, so that a message with a mistake in its text is
    /// still a message.
    ///
    /// # Errors
    /// [`WireError::Json`] and [`WireError::Shape`].
    pub fn parse(json: &[u8]) -> Result<Self, WireError> {
        let [name, message] = read_keys(json, "the notification", ["name", "notify_msg"])?;
        Ok(Self {
            name: name.text("name")?.unwrap_or_default(),
            message: message.text("notify_msg")?.unwrap_or_default(),
        })
    }

    /// Length of the frame, as its prefix counts it: the type byte and the JSON.
    #[must_use]
    pub fn frame_len(&self) -> u64 {
        TYPE_LEN + self.to_json().len() as u64
    }
}

/// The body that answers a notification.
#[must_use]
pub fn notify_reply() -> &'static [u8] {
    b"{\"name\":\"\",\"notify_msg\":\"success\"}\n"
}

/// Whether the answer to a notification says that it was delivered.
#[must_use]
pub fn is_notify_success(json: &[u8]) -> bool {
    says_success(json, "notify_msg")
}

/// The body of a probe.
#[must_use]
pub fn probe_request() -> &'static [u8] {
    b"{}\n"
}

/// The body that answers a probe.
#[must_use]
pub fn probe_reply() -> &'static [u8] {
    b"{\"status\":\"success\"}\n"
}

/// Whether the answer to a probe is a sign of life.
#[must_use]
pub fn is_probe_success(json: &[u8]) -> bool {
    says_success(json, "status")
}

/// The body with which an engine without RDMA answers a connection handshake.
#[must_use]
pub fn connection_reply() -> &'static [u8] {
    concat!(
        r#"{"local_gid":"","local_lid":0,"local_nic_path":"","payload":"","#,
        r#""peer_nic_path":"","qp_num":[],"reply_msg":""}"#,
        "\n"
    )
    .as_bytes()
}

/// Checks that the body of a connection handshake has the right shape; each key may be absent.
///
/// # Errors
/// [`WireError::Json`] and [`WireError::Shape`].
pub fn check_connection_request(json: &[u8]) -> Result<(), WireError> {
    let mut request = ConnectionRequest::default();
    read_object(json, "the handshake", &mut request)?;
    for (key, field) in CONNECTION_TEXTS.into_iter().zip(request.texts) {
        field.text(key)?;
    }
    request.local_lid.integer::<u16>("local_lid")?;
    match request.qp_num {
        Field::Absent | Field::Array => {}
        other => return Err(other.refused("qp_num", "an array")),
    }
    request.qp_nums.refused.map_or(Ok(()), Err)
}

const CONNECTION_TEXTS: [&str; 5] =
    ["local_gid", "local_nic_path", "payload", "peer_nic_path", "reply_msg"];

#[derive(Default)]
struct ConnectionRequest {
    texts: [Field; CONNECTION_TEXTS.len()],
    local_lid: Field,
    qp_num: Field,
    qp_nums: QueuePairs,
}

impl<'de> Contents<'de> for &mut ConnectionRequest {
    fn object<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            if let Some(at) = CONNECTION_TEXTS.iter().position(|known| *known == key) {
                self.texts[at] = map.next_value()?;
            } else if key == "local_lid" {
                self.local_lid = map.next_value()?;
            } else if key == "qp_num" {
                self.qp_nums = QueuePairs::default();
                self.qp_num = map.next_value_seed(Read(&mut self.qp_nums))?;
            } else {
                map.next_value::<Field>()?;
            }
        }
        Ok(())
    }
}

#[derive(Default)]
struct QueuePairs {
    refused: Option<WireError>,
}

impl<'de> Contents<'de> for &mut QueuePairs {
    fn array<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(field) = seq.next_element::<Field>()? {
            let checked = match field {
                Field::Integer(_) => field.integer::<u32>("a number in qp_num").map(|_| ()),
                other => Err(other.refused("an entry of qp_num", "an integer from 0")),
            };
            self.refused = self.refused.take().or(checked.err());
        }
        Ok(())
    }
}

fn says_success(json: &[u8], key: &str) -> bool {
    let answer = read_keys(json, "the answer", [key]);
    matches!(answer, Ok([Field::Text(text)]) if text == SUCCESS)
}

/// Reads some keys of an object, whose text may have bytes that are not UTF-8.
fn read_keys<const N: usize>(
    json: &[u8],
    message: &str,
    keys: [&str; N],
) -> Result<[Field; N], WireError> {
    let mut fields = std::array::from_fn(|_| Field::Absent);
    let text = String::from_utf8_lossy(json);
    read_object(text.as_bytes(), message, Keys { keys, fields: &mut fields })?;
    Ok(fields)
}

struct Keys<'k, const N: usize> {
    keys: [&'k str; N],
    fields: &'k mut [Field; N],
}

impl<'de, const N: usize> Contents<'de> for Keys<'_, N> {
    fn object<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value()?;
            if let Some(at) = self.keys.iter().position(|known| *known == key) {
                self.fields[at] = value;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(what: &str) -> WireError {
        WireError::Shape { what: what.to_owned() }
    }

    #[test]
    fn a_notification_survives_bytes_that_are_no_text() {
        let got = Notification::parse(b"{\"name\":\"a\xffb\",\"notify_msg\":\"\xc3\"}").unwrap();
        assert_eq!(got.name, "a\u{fffd}b");
        assert_eq!(got.message, "\u{fffd}");
    }

    #[test]
    fn a_notification_is_taken_with_gaps_and_with_more() {
        assert_eq!(Notification::parse(b" {} \n"), Ok(Notification::default()));
        let got = Notification::parse(b"{\"x\":[{}],\"notify_msg\":\"m\",\"name\":null}").unwrap();
        assert_eq!(got, Notification { name: String::new(), message: "m".to_owned() });
    }

    #[test]
    fn a_notification_of_another_shape_is_refused_by_key() {
        for (json, what) in [
            ("[]", "the notification is an array, expected an object"),
            ("1", "the notification is an integer, expected an object"),
            ("null", "the notification is null, expected an object"),
            ("\"s\"", "the notification is a string, expected an object"),
            ("{\"name\":{}}", "name is an object, expected a string"),
            ("{\"notify_msg\":[]}", "notify_msg is an array, expected a string"),
            ("{\"notify_msg\":1.5}", "notify_msg is a fraction, expected a string"),
        ] {
            assert_eq!(Notification::parse(json.as_bytes()), Err(shape(what)), "{json}");
        }
        assert!(matches!(Notification::parse(b"{}x"), Err(WireError::Json { .. })));
        assert!(matches!(Notification::parse(b""), Err(WireError::Json { .. })));
    }

    #[test]
    fn the_counted_length_is_that_of_the_frame() {
        let notification =
            Notification { name: "nm\u{1}\"".to_owned(), message: "grüße".to_owned() };
        assert_eq!(notification.frame_len(), 1 + notification.to_json().len() as u64);
        assert_eq!(Notification::parse(&notification.to_json()), Ok(notification));
    }

    #[test]
    fn only_the_word_success_is_a_success() {
        assert!(is_notify_success(notify_reply()));
        assert!(is_probe_success(probe_reply()));
        for json in ["", "{}", "[]", "null", "{\"status\":1}", "{\"status\":\"failure\"}"] {
            assert!(!is_probe_success(json.as_bytes()), "{json}");
            assert!(!is_notify_success(json.as_bytes()), "{json}");
        }
    }

    #[test]
    fn a_handshake_is_checked_key_by_key() {
        for json in ["{}", "{\"qp_num\":[1,2],\"local_lid\":7,\"ready_ack\":true,\"x\":[]}"] {
            assert_eq!(check_connection_request(json.as_bytes()), Ok(()), "{json}");
        }
        for (json, what) in [
            ("[]", "the handshake is an array, expected an object"),
            ("7", "the handshake is an integer, expected an object"),
            ("{\"payload\":{}}", "payload is an object, expected a string"),
            ("{\"local_lid\":\"x\"}", "local_lid is a string, expected an integer from 0"),
            ("{\"local_lid\":65536}", "local_lid is 65536, which is too large"),
            ("{\"qp_num\":{}}", "qp_num is an object, expected an array"),
            (
                "{\"qp_num\":[1,\"x\",-1]}",
                "an entry of qp_num is a string, expected an integer from 0",
            ),
            (
                "{\"qp_num\":[-1]}",
                "an entry of qp_num is a negative number, expected an integer from 0",
            ),
            ("{\"qp_num\":[4294967296]}", "a number in qp_num is 4294967296, which is too large"),
        ] {
            assert_eq!(check_connection_request(json.as_bytes()), Err(shape(what)), "{json}");
        }
    }

    #[test]
    fn deep_nesting_is_refused() {
        for json in ["[".repeat(5000), "{\"a\":".repeat(5000)] {
            let got = Notification::parse(json.as_bytes());
            assert!(matches!(got, Err(WireError::Json { .. })), "{got:?}");
        }
        let balanced = format!("{{\"x\":{}{}}}", "[".repeat(5000), "]".repeat(5000));
        let got = check_connection_request(balanced.as_bytes());
        assert!(matches!(got, Err(WireError::Json { .. })), "{got:?}");
    }
}
