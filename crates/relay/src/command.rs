//! Orders and answers as JSON, one on a line.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::rule::{Accept, Copies, End, Port, Rule};
use crate::{CopyCounts, Error, Relay};

/// An order to the program.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum Command {
    /// [`Relay::rule`].
    Rule(Rule),
    /// [`Relay::accept`].
    Accept {
        /// All if there is none.
        #[serde(default)]
        copies: Option<Copies>,
        /// The data port if there is none.
        #[serde(default)]
        port: Port,
        /// What those who connect meet.
        how: Accept,
    },
    /// [`Relay::idle`].
    Idle {
        /// All if there is none.
        #[serde(default)]
        copies: Option<Copies>,
        /// The data port if there is none.
        #[serde(default)]
        port: Port,
        /// After how many milliseconds; never if there is none.
        #[serde(default)]
        ms: Option<u64>,
        /// How; by a FIN if nothing is said.
        #[serde(default = "fin")]
        how: End,
    },
    /// [`Relay::kill`].
    Kill {
        /// All if there is none.
        #[serde(default)]
        copies: Option<Copies>,
        /// Both if there is none.
        #[serde(default)]
        port: Option<Port>,
        /// How they end.
        how: End,
    },
    /// [`Relay::retarget`].
    Retarget {
        /// All if there is none.
        #[serde(default)]
        copies: Option<Copies>,
        /// The control port of the engine, `host:port`.
        target: String,
    },
    /// [`Relay::counts`].
    Counts {},
    /// Ends the program.
    Quit {},
}

fn fin() -> End {
    End::Fin
}

/// What became of an order.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It has been carried out.
    Ok(bool),
    /// It has not, and why.
    Error(String),
    /// What was asked for, one entry for each copy.
    Counts(Vec<CopyCounts>),
}

impl Command {
    /// Has a relay carry it out. [`Command::Quit`] is for whoever owns the relay.
    #[must_use]
    pub fn carry_out(self, relay: &Relay) -> Answer {
        let done = match self {
            Self::Rule(rule) => relay.rule(rule),
            Self::Accept { copies, port, how } => relay.accept(copies, port, how),
            Self::Idle { copies, port, ms, how } => {
                relay.idle(copies, port, ms.map(|ms| (Duration::from_millis(ms), how)))
            }
            Self::Kill { copies, port, how } => relay.kill(copies, port, how),
            Self::Retarget { copies, target } => relay.retarget(copies, &target),
            Self::Counts {} => return relay.counts().map_or_else(Answer::from, Answer::Counts),
            Self::Quit {} => Ok(()),
        };
        done.map_or_else(Answer::from, |()| Answer::Ok(true))
    }
}

impl From<Error> for Answer {
    fn from(error: Error) -> Self {
        Self::Error(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::{Connections, Way};

    fn read(line: &str) -> Result<Command, String> {
        serde_json::from_str(line).map_err(|e| e.to_string())
    }

    #[test]
    fn orders_are_read_with_what_was_left_out() {
        let rule = Rule::new(Way::ToInitiator).copy(3).after(24, End::Rst);
        let line =
            r#"{"do":"rule","copies":3,"way":"to_initiator","after":{"bytes":24,"end":"rst"}}"#;
        assert_eq!(read(line), Ok(Command::Rule(rule)));
        let rule = Rule { copies: Some(Copies::Some(vec![0, 2])), ..Rule::default() };
        let rule = rule.port(Port::Control).connections(Connections::Future).rate(1);
        let line =
            r#"{"do":"rule","copies":[0,2],"port":"control","connections":"future","rate":1}"#;
        assert_eq!(read(line), Ok(Command::Rule(rule)));
        let kill = Command::Kill { copies: None, port: None, how: End::Silence };
        assert_eq!(read(r#"{"do":"kill","how":"vanish"}"#), Ok(kill));
        assert_eq!(read(r#"{"do":"counts"}"#), Ok(Command::Counts {}));
    }

    #[test]
    fn a_typing_mistake_is_not_passed_over() {
        for line in [
            r#"{"do":"rule","delay":2}"#,
            r#"{"do":"rule","after":{"bytes":1,"end":"rst","way":"both"}}"#,
            r#"{"do":"accept","how":"maybe"}"#,
            r#"{"do":"counts","copies":1}"#,
            r#"{"do":"dance"}"#,
            r#"{"copies":1}"#,
            "[]",
            "",
        ] {
            assert!(read(line).is_err(), "{line}");
        }
    }
}
