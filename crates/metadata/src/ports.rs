use std::fmt;
use std::str::FromStr;

use crate::MetadataError;
use crate::name::decimal;

const DEFAULT_FIRST: u16 = 15000;
const DEFAULT_LAST: u16 = 17000;

/// The ports among which an engine chooses, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    /// The lowest port.
    pub first: u16,
    /// The highest port.
    pub last: u16,
}

impl PortRange {
    /// Whether `port` is one of them.
    #[must_use]
    pub fn contains(&self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }

    /// How many ports there are.
    #[must_use]
    pub fn len(&self) -> usize {
        (self.first..=self.last).len()
    }

    /// Whether there is no port at all, which a range that was parsed never says.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.first > self.last
    }
}

impl Default for PortRange {
    /// The range that peers use.
    fn default() -> Self {
        Self { first: DEFAULT_FIRST, last: DEFAULT_LAST }
    }
}

impl FromStr for PortRange {
    type Err = MetadataError;

    /// Reads `first-last`.
    fn from_str(text: &str) -> Result<Self, MetadataError> {
        let ends = text.split_once('-').map(|(first, last)| (decimal(first), decimal(last)));
        match ends {
            Some((Some(first), Some(last))) if 0 < first && first <= last => {
                Ok(Self { first, last })
            }
            _ => Err(MetadataError::BadPortRange { text: text.to_owned() }),
        }
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_includes_both_ends() {
        let range: PortRange = "15000-15001".parse().unwrap();
        assert_eq!((range.len(), range.is_empty()), (2, false));
        assert!(range.contains(15000) && range.contains(15001));
        assert!(!range.contains(14999) && !range.contains(15002));
        let all: PortRange = "1-65535".parse().unwrap();
        assert_eq!(all.len(), 65535);
        let none = PortRange { first: 2, last: 1 };
        assert_eq!((none.len(), none.is_empty(), none.contains(1)), (0, true, false));
    }

    #[test]
    fn ranges_are_written_as_they_are_read() {
        assert_eq!(PortRange::default().to_string(), "15000-17000");
        assert_eq!("15000-17000".parse(), Ok(PortRange::default()));
        assert_eq!("7-7".parse(), Ok(PortRange { first: 7, last: 7 }));
    }

    #[test]
    fn what_is_no_range_is_refused() {
        for text in ["", "-", "1", "1-", "-1", "0-1", "2-1", "1-65536", "a-b", "1 - 2", "1-2-3"] {
            let bad = MetadataError::BadPortRange { text: text.to_owned() };
            assert_eq!(text.parse::<PortRange>(), Err(bad));
        }
        assert_eq!(
            "2-1".parse::<PortRange>().unwrap_err().to_string(),
            "\"2-1\": not a range of ports; write first-last, such as 15000-17000, from 1 to 65535"
        );
    }
}
