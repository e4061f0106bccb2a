use std::fmt::Write as _;

use serde::de::{MapAccess, SeqAccess};

use crate::WireError;
use crate::json::{Contents, Field, Read, read_object, shape};

const PROTOCOL: &str = "tcp";
const TYPE_LEN: usize = 1;
const INCARNATION_DIGITS: usize = 16;
/// How much of a peer's text an error quotes.
const QUOTED_CHARS: usize = 40;

/// What is published about a segment: how to reach it, and which buffers it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentDescriptor {
    /// The segment's name. Released peers refuse buffers of a segment without one.
    pub name: String,
    /// The transport; always `tcp`.
    pub protocol: String,
    /// The registered buffers, in the order of their registration.
    pub buffers: Vec<BufferDescriptor>,
    /// The host of the data port; `None` if it is the one in the segment's name.
    pub tcp_data_host: Option<String>,
    /// The data port; zero if the peer published none.
    pub tcp_data_port: u16,
    /// The newest data-plane version the segment speaks.
    pub tcp_proto_version: u32,
    /// Always empty for TCP.
    pub rdma_server_name: String,
    /// Local time of the publisher; for people.
    pub timestamp: String,
    /// What only segments of this project publish.
    pub tensorferry: Option<FerryKey>,
}

/// One registered buffer of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferDescriptor {
    /// Its first address in the target's process; not zero.
    pub addr: u64,
    /// Its length in bytes; not zero.
    pub len: u64,
}

/// What segments of this project say about themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FerryKey {
    /// The version of the program.
    pub version: String,
    /// Drawn when the engine starts, so that a restarted one is told from its predecessor.
    pub incarnation: u64,
    /// The list of buffers was cut to what fits a frame.
    pub buffers_truncated: bool,
}

/// A descriptor as it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// The body of the frame.
    pub json: Vec<u8>,
    /// How many of the buffers are in it.
    pub buffers_written: usize,
}

impl Default for SegmentDescriptor {
    /// A TCP segment that speaks v1, and has no name and no buffers.
    fn default() -> Self {
        Self {
            name: String::new(),
            protocol: PROTOCOL.to_owned(),
            buffers: Vec::new(),
            tcp_data_host: None,
            tcp_data_port: 0,
            tcp_proto_version: DEFAULT_PROTO_VERSION,
            rdma_server_name: String::new(),
            timestamp: String::new(),
            tensorferry: None,
        }
    }
}

/// Of peers that are older than the key.
const DEFAULT_PROTO_VERSION: u32 = 1;

impl SegmentDescriptor {
    /// Writes the body of a metadata frame that is at most `limit` bytes long, type byte included.
    ///
    /// If the buffers do not all fit, the first ones that do are written, and
    /// [`FerryKey::buffers_truncated`] is published as true. Without any buffer the body is written
    /// even if it is longer than `limit`.
    #[must_use]
    pub fn to_json(&self, limit: u64) -> Encoded {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let whole_tail = self.tail(false);
        let cut_tail = self.tail(true);
        let name = quoted(&self.name);
        let mut json = String::from("{\"buffers\":[");
        let mut cut = (json.len(), 0);
        for (index, buffer) in self.buffers.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let BufferDescriptor { addr, len } = buffer;
            push(
                &mut json,
                format_args!("{comma}{{\"addr\":{addr},\"length\":{len},\"name\":{name}}}"),
            );
            if TYPE_LEN + json.len() + cut_tail.len() <= limit {
                cut = (json.len(), index + 1);
            }
            if TYPE_LEN + json.len() + whole_tail.len() > limit {
                json.truncate(cut.0);
                json.push_str(&cut_tail);
                return Encoded { json: json.into_bytes(), buffers_written: cut.1 };
            }
        }
        json.push_str(&whole_tail);
        Encoded { json: json.into_bytes(), buffers_written: self.buffers.len() }
    }

    /// Reads the body of a metadata frame, or the value of a metadata store.
    ///
    /// Unknown keys are ignored, and absent ones have a default. What a key holds must be of its
    /// type and in its range.
    ///
    /// # Errors
    /// [`WireError::Json`], [`WireError::Protocol`] and [`WireError::Shape`].
    pub fn parse(json: &[u8]) -> Result<Self, WireError> {
        let mut raw = RawDescriptor::default();
        read_object(json, "the descriptor", &mut raw)?;
        let protocol = raw.protocol.text("protocol")?.unwrap_or_default();
        if protocol != PROTOCOL {
            let got = protocol.chars().take(QUOTED_CHARS).collect();
            return Err(WireError::Protocol { got });
        }
        let data_host = raw.tcp_data_host.text("tcp_data_host")?;
        let proto_version = raw.tcp_proto_version.integer("tcp_proto_version")?;
        Ok(Self {
            name: raw.name.text("name")?.unwrap_or_default(),
            protocol,
            buffers: raw.buffers.checked()?,
            tcp_data_host: data_host.filter(|host| !host.is_empty()),
            tcp_data_port: raw.tcp_data_port.integer("tcp_data_port")?.unwrap_or_default(),
            tcp_proto_version: proto_version.unwrap_or(DEFAULT_PROTO_VERSION),
            rdma_server_name: raw.rdma_server_name.text("rdma_server_name")?.unwrap_or_default(),
            timestamp: raw.timestamp.text("timestamp")?.unwrap_or_default(),
            tensorferry: raw.tensorferry.checked()?,
        })
    }

    /// What follows the last buffer. Keys are in byte order, as released peers write them.
    fn tail(&self, cut: bool) -> String {
        let mut tail = String::from("],");
        let (name, protocol) = (quoted(&self.name), quoted(&self.protocol));
        push(&mut tail, format_args!("\"name\":{name},\"protocol\":{protocol},"));
        push(&mut tail, format_args!("\"rdma_server_name\":{},", quoted(&self.rdma_server_name)));
        if let Some(host) = &self.tcp_data_host {
            push(&mut tail, format_args!("\"tcp_data_host\":{},", quoted(host)));
        }
        push(&mut tail, format_args!("\"tcp_data_port\":{},", self.tcp_data_port));
        push(&mut tail, format_args!("\"tcp_proto_version\":{},", self.tcp_proto_version));
        if let Some(ferry) = &self.tensorferry {
            push(&mut tail, format_args!("\"tensorferry\":{},", ferry.to_json(cut)));
        }
        push(&mut tail, format_args!("\"timestamp\":{}}}\n", quoted(&self.timestamp)));
        tail
    }
}

impl FerryKey {
    fn to_json(&self, cut: bool) -> String {
        let mut json = String::from("{");
        if self.buffers_truncated || cut {
            json.push_str("\"buffers_truncated\":true,");
        }
        let Self { incarnation, version, .. } = self;
        push(
            &mut json,
            format_args!(
                "\"incarnation\":\"{incarnation:0INCARNATION_DIGITS$x}\",\"version\":{}}}",
                quoted(version)
            ),
        );
        json
    }
}

/// The keys of a descriptor, before anything is known about what they hold.
#[derive(Default)]
struct RawDescriptor {
    buffers: RawBuffers,
    name: Field,
    protocol: Field,
    rdma_server_name: Field,
    tcp_data_host: Field,
    tcp_data_port: Field,
    tcp_proto_version: Field,
    tensorferry: RawFerryKey,
    timestamp: Field,
}

impl<'de> Contents<'de> for &mut RawDescriptor {
    fn object<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "buffers" => {
                    self.buffers = RawBuffers::default();
                    self.buffers.kind = map.next_value_seed(Read(&mut self.buffers))?;
                }
                "name" => self.name = map.next_value()?,
                "protocol" => self.protocol = map.next_value()?,
                "rdma_server_name" => self.rdma_server_name = map.next_value()?,
                "tcp_data_host" => self.tcp_data_host = map.next_value()?,
                "tcp_data_port" => self.tcp_data_port = map.next_value()?,
                "tcp_proto_version" => self.tcp_proto_version = map.next_value()?,
                "tensorferry" => {
                    self.tensorferry = RawFerryKey::default();
                    self.tensorferry.kind = map.next_value_seed(Read(&mut self.tensorferry))?;
                }
                "timestamp" => self.timestamp = map.next_value()?,
                _ => drop(map.next_value::<Field>()?),
            }
        }
        Ok(())
    }
}

/// Checked entry by entry, so that a long list is not held in two forms.
#[derive(Default)]
struct RawBuffers {
    kind: Field,
    list: Vec<BufferDescriptor>,
    refused: Option<WireError>,
}

impl RawBuffers {
    fn checked(self) -> Result<Vec<BufferDescriptor>, WireError> {
        match self.kind {
            Field::Absent | Field::Array => self.refused.map_or(Ok(self.list), Err),
            other => Err(other.refused("buffers", "an array")),
        }
    }
}

impl<'de> Contents<'de> for &mut RawBuffers {
    fn array<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        loop {
            let mut raw = RawBuffer::default();
            let Some(kind) = seq.next_element_seed(Read(&mut raw))? else {
                return Ok(());
            };
            if self.refused.is_none() {
                match raw.checked(&kind, self.list.len()) {
                    Ok(buffer) => self.list.push(buffer),
                    Err(error) => self.refused = Some(error),
                }
            }
        }
    }
}

#[derive(Default)]
struct RawBuffer {
    addr: Field,
    len: Field,
    name: Field,
}

impl RawBuffer {
    fn checked(self, kind: &Field, index: usize) -> Result<BufferDescriptor, WireError> {
        if !matches!(kind, Field::Object) {
            return Err(kind.refused(format_args!("buffers[{index}]"), "an object"));
        }
        self.name.text(format_args!("buffers[{index}].name"))?;
        let addr = not_zero(self.addr, format_args!("buffers[{index}].addr"))?;
        let len = not_zero(self.len, format_args!("buffers[{index}].length"))?;
        if addr.checked_add(len).is_none() {
            return Err(shape(format!("buffers[{index}]: {addr:#x} + {len} is past 64 bits")));
        }
        Ok(BufferDescriptor { addr, len })
    }
}

impl<'de> Contents<'de> for &mut RawBuffer {
    fn object<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value()?;
            match key.as_str() {
                "addr" => self.addr = value,
                "length" => self.len = value,
                "name" => self.name = value,
                _ => {}
            }
        }
        Ok(())
    }
}

#[derive(Default)]
struct RawFerryKey {
    kind: Field,
    buffers_truncated: Field,
    incarnation: Field,
    version: Field,
}

impl RawFerryKey {
    fn checked(self) -> Result<Option<FerryKey>, WireError> {
        match self.kind {
            Field::Absent => return Ok(None),
            Field::Object => {}
            other => return Err(other.refused("tensorferry", "an object")),
        }
        let incarnation = self.incarnation.text("tensorferry.incarnation")?;
        let Some(incarnation) = incarnation.as_deref().and_then(parse_incarnation) else {
            return Err(shape(format!(
                "tensorferry.incarnation is not {INCARNATION_DIGITS} hexadecimal digits"
            )));
        };
        Ok(Some(FerryKey {
            version: self.version.text("tensorferry.version")?.unwrap_or_default(),
            incarnation,
            buffers_truncated: self.buffers_truncated.flag("tensorferry.buffers_truncated")?,
        }))
    }
}

impl<'de> Contents<'de> for &mut RawFerryKey {
    fn object<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value()?;
            match key.as_str() {
                "buffers_truncated" => self.buffers_truncated = value,
                "incarnation" => self.incarnation = value,
                "version" => self.version = value,
                _ => {}
            }
        }
        Ok(())
    }
}

fn not_zero(field: Field, key: std::fmt::Arguments<'_>) -> Result<u64, WireError> {
    match field {
        Field::Integer(value) if value > 0 => Ok(value),
        Field::Integer(_) => Err(shape(format!("{key} is 0, expected an integer from 1"))),
        other => Err(other.refused(key, "an integer from 1")),
    }
}

fn parse_incarnation(text: &str) -> Option<u64> {
    // `from_str_radix` alone would take a sign, and fewer digits.
    let plain = text.len() == INCARNATION_DIGITS && text.bytes().all(|b| b.is_ascii_hexdigit());
    plain.then(|| u64::from_str_radix(text, 16).ok()).flatten()
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn push(text: &mut String, part: std::fmt::Arguments<'_>) {
    text.write_fmt(part).expect("writing to a String does not fail");
}
