//! JSON as peers send it.
//!
//! A body is read without building a tree: a tree of `[[],[],…]` would take many times the memory
//! of its text. Each value of interest becomes a [`Field`], which is never an error by itself, so
//! that a wrong shape can be reported with the name of its key.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::WireError;

/// One past the largest `u64`, where conversions from floats stop being exact.
const U64_END: f64 = 18_446_744_073_709_551_616.0;

/// One value, as far as it can be told apart without its key.
#[derive(Debug, Default)]
pub(crate) enum Field {
    /// No such key, or `null`, which released peers take for the same.
    #[default]
    Absent,
    Integer(u64),
    Text(String),
    Flag(bool),
    Object,
    Array,
    /// A number that is no `u64`.
    Number(&'static str),
}

impl Field {
    pub(crate) fn text(self, key: impl fmt::Display) -> Result<Option<String>, WireError> {
        match self {
            Self::Absent => Ok(None),
            Self::Text(text) => Ok(Some(text)),
            other => Err(other.refused(key, "a string")),
        }
    }

    pub(crate) fn flag(self, key: impl fmt::Display) -> Result<bool, WireError> {
        match self {
            Self::Absent => Ok(false),
            Self::Flag(flag) => Ok(flag),
            other => Err(other.refused(key, "true or false")),
        }
    }

    pub(crate) fn integer<T>(self, key: impl fmt::Display) -> Result<Option<T>, WireError>
    where
        T: TryFrom<u64>,
    {
        match self {
            Self::Absent => Ok(None),
            Self::Integer(value) => match T::try_from(value) {
                Ok(value) => Ok(Some(value)),
                Err(_) => Err(shape(format!("{key} is {value}, which is too large"))),
            },
            other => Err(other.refused(key, "an integer from 0")),
        }
    }

    pub(crate) fn refused(&self, key: impl fmt::Display, expected: &str) -> WireError {
        let got = match self {
            Self::Absent => "absent",
            Self::Integer(_) => "an integer",
            Self::Text(_) => "a string",
            Self::Flag(_) => "a boolean",
            Self::Object => "an object",
            Self::Array => "an array",
            Self::Number(kind) => kind,
        };
        shape(format!("{key} is {got}, expected {expected}"))
    }

    fn float(value: f64) -> Self {
        if value.fract() != 0.0 {
            Self::Number("a fraction")
        } else if value < 0.0 {
            Self::Number("a negative number")
        } else if value >= U64_END {
            Self::Number("a number past 64 bits")
        } else {
            Self::Integer(value as u64)
        }
    }
}

impl<'de> Deserialize<'de> for Field {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Read(Ignored).deserialize(deserializer)
    }
}

/// What becomes of the contents of an object or an array.
pub(crate) trait Contents<'de>: Sized {
    fn object<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_entry::<Field, Field>()?.is_some() {}
        Ok(())
    }

    fn array<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element::<Field>()?.is_some() {}
        Ok(())
    }
}

/// Contents that nobody asks for. They are still parsed, with the parser's limit on nesting.
struct Ignored;

impl Contents<'_> for Ignored {}

/// Reads one value, and hands its contents on.
pub(crate) struct Read<C>(pub(crate) C);

impl<'de, C: Contents<'de>> DeserializeSeed<'de> for Read<C> {
    type Value = Field;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Field, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, C: Contents<'de>> Visitor<'de> for Read<C> {
    type Value = Field;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Field, E> {
        Ok(Field::Absent)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Field, E> {
        Ok(Field::Flag(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Field, E> {
        Ok(Field::Integer(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Field, E> {
        Ok(u64::try_from(value).map_or(Field::Number("a negative number"), Field::Integer))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Field, E> {
        Ok(Field::float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Field, E> {
        Ok(Field::Text(value.to_owned()))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Field, A::Error> {
        self.0.object(map)?;
        Ok(Field::Object)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Field, A::Error> {
        self.0.array(seq)?;
        Ok(Field::Array)
    }
}

/// Reads a message, which must be an object.
pub(crate) fn read_object<'de>(
    json: &'de [u8],
    message: &str,
    contents: impl Contents<'de>,
) -> Result<(), WireError> {
    let mut parser = serde_json::Deserializer::from_slice(json);
    let read = Read(contents).deserialize(&mut parser);
    match read.and_then(|field| parser.end().map(|()| field)) {
        Ok(Field::Object) => Ok(()),
        Ok(Field::Absent) => Err(shape(format!("{message} is null, expected an object"))),
        Ok(other) => Err(other.refused(message, "an object")),
        Err(error) => Err(WireError::Json { reason: error.to_string() }),
    }
}

pub(crate) fn shape(what: String) -> WireError {
    WireError::Shape { what }
}
