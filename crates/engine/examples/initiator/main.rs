//! An engine that is told by lines what to transfer, and says in detail what became of it: the initiator of
//! `scripts/faults`, where the Python face cannot express something (entry by entry, cancel, a deadline of a batch).
//!
//! Each line on standard input is an order, `{"id": 1, "do": "submit", "args": {…}}`. It is answered by a line
//! `{"id": 1, "value": …}` or `{"id": 1, "failure": text}` when it is done, so a slow one holds up no other. The end of
//! the input is the end of the program. Settings come from the environment; the argument is the size of its memory.

#![allow(clippy::print_stdout, reason = "it is a program")]

mod area;
mod orders;

use std::io::{BufRead, Write};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Value, json};
use tensorferry::{Config, Engine};

use crate::area::Area;
use crate::orders::{Order, Orders};

#[derive(Deserialize)]
struct Line {
    id: u64,
    #[serde(flatten)]
    order: Order,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let size = std::env::args().nth(1).ok_or("usage: initiator BYTES")?.parse()?;
    let area = Area::new(size)?;
    let engine = Engine::new("127.0.0.1", Config::from_env()?)?;
    say(0, Ok(json!({"name": engine.name(), "base": area.base()})));
    let orders = Arc::new(Orders::new(engine, area));
    for line in std::io::stdin().lock().lines() {
        let Line { id, order } = serde_json::from_str(&line?)?;
        let orders = Arc::clone(&orders);
        std::thread::spawn(move || say(id, orders.obey(order)));
    }
    Ok(())
}

fn say(id: u64, answer: Result<Value, Failure>) {
    let line = match answer {
        Ok(value) => json!({"id": id, "value": value}),
        Err(failure) => json!({"id": id, "failure": failure.to_string()}),
    };
    let mut out = std::io::stdout().lock();
    // Whoever does not listen any more needs no answer.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
