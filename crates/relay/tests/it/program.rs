//! The program as scripts use it.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

use crate::kit::Stand;

struct Program {
    process: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Program {
    fn start(args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tensorferry-relay"));
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let orders = process.stdin.take();
        let answers = BufReader::new(process.stdout.take().unwrap());
        Self { process, orders, answers }
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn tell(&mut self, line: &str) -> Value {
        writeln!(self.orders.as_mut().unwrap(), "{line}").unwrap();
        self.answer()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.orders = None;
        self.process.wait().unwrap();
    }
}

#[test]
fn it_is_told_what_to_do_line_by_line() {
    let stand = Stand::new();
    let mut program = Program::start(&[&stand.control.to_string(), "--copies", "3"]);
    let ready = program.answer();
    let copies = ready["ready"].as_array().unwrap();
    assert_eq!(copies.len(), 3);
    let data = copies[2]["data"].as_str().unwrap().to_owned();
    assert!(copies[2]["control"].as_str().unwrap().starts_with("127.0.0.1:"));
    TcpStream::connect(&data).unwrap();

    let ok = json!({"ok": true});
    assert_eq!(program.tell(r#"{"do":"accept","copies":2,"how":"refuse"}"#), ok);
    TcpStream::connect(&data).unwrap_err();
    assert_eq!(program.tell(r#"{"do":"rule","delay_ms":5,"way":"to_target"}"#), ok);
    assert_eq!(program.tell(r#"{"do":"idle","ms":5}"#), ok);
    assert_eq!(program.tell(r#"{"do":"kill","how":"rst"}"#), ok);
    let target = format!(r#"{{"do":"retarget","target":"{}"}}"#, stand.control);
    assert_eq!(program.tell(&target), ok);
    let counts = program.tell(r#"{"do":"counts"}"#);
    assert_eq!(counts["counts"].as_array().unwrap().len(), 3);
    assert_eq!(counts["counts"][2]["data"]["total"], 1);

    let error = |answer: Value| answer["error"].as_str().unwrap().to_owned();
    assert!(error(program.tell(r#"{"do":"rule","late":5}"#)).contains("late"));
    assert!(error(program.tell(r#"{"do":"kill","copies":3,"how":"rst"}"#)).contains("no copy 3"));
    assert!(error(program.tell(r#"{"do":"retarget","target":"nowhere"}"#)).contains("nowhere"));
    assert_eq!(program.tell(r#"{"do":"quit"}"#), ok);
    assert!(program.process.wait().unwrap().success());
}

#[test]
fn it_ends_with_its_input() {
    let stand = Stand::new();
    let mut program = Program::start(&[&stand.control.to_string()]);
    program.answer();
    program.orders = None;
    assert!(program.process.wait().unwrap().success());
}

#[test]
fn a_target_that_is_no_address_is_said() {
    let output = Command::new(env!("CARGO_BIN_EXE_tensorferry-relay")).arg("nowhere").output();
    let output = output.unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("\"nowhere\" is no address of a control port, host:port"), "{text}");
}
