//! The initiator's hold on the target process.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::plan::Plan;
use crate::measure::link::{Link, Lost, Obedient, unexpected};
use crate::measure::orders::{Answer, Order};

/// A running target. It ends when this is dropped; should this process be killed, the pipe to its
/// stdin is closed by the kernel, and it ends as well.
pub(crate) struct Target {
    child: Child,
    /// Its stdin and stdout.
    link: Link,
    /// The segment name of its engine.
    pub(crate) segment: String,
    /// Where its memory is, in its own process.
    pub(crate) addr: u64,
    /// The name of the device that it is on.
    pub(crate) device: Option<String>,
}

/// The longest that a target may take for one order.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long it may take to end before it is killed.
const FAREWELL: Duration = Duration::from_secs(10);

impl Target {
    /// The command that runs `rerun` as the target of this plan.
    ///
    /// # Errors
    /// There is no such command.
    pub(crate) fn command(plan: &Plan, rerun: &[OsString]) -> Result<Command> {
        let (program, args) = rerun.split_first().context(
            "the path of this program cannot be found out, so the target process cannot be started; \
             is /proc mounted?",
        )?;
        let mut command = Command::new(program);
        command
            .args(args)
            .args(["__target", "--host", &plan.host])
            .args(["--bytes", &plan.memory_bytes().to_string()])
            .args(["--memory", &plan.memory.target.to_string()]);
        Ok(command)
    }

    /// Starts a target and waits until peers can reach its memory.
    pub(crate) fn start(mut command: Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A Ctrl-C is for the initiator alone, which then ends the target in good order.
            .process_group(0)
            .spawn()
            .with_context(|| {
                let program = Path::new(command.get_program());
                format!("the target process ({}) did not start", program.display())
            })?;
        let (orders, answers) = (child.stdin.take(), child.stdout.take());
        let link = Link::new(
            orders.context("the target's stdin is not a pipe")?,
            answers.context("the target's stdout is not a pipe")?,
        );
        let (segment, device) = (String::new(), None);
        let mut target = Self { child, link, segment, addr: 0, device };
        match target.answer(0)? {
            Answer::Ready { segment, addr, device } => {
                (target.segment, target.addr, target.device) = (segment, addr, device);
                Ok(target)
            }
            Answer::Failed { why } => bail!("the target did not start: {why}"),
            other => Err(unexpected(&other)),
        }
    }

    /// Ends the target.
    ///
    /// # Errors
    /// It had to be killed, or it failed at the end.
    pub(crate) fn stop(mut self) -> Result<()> {
        let status = self.end()?;
        ensure!(status.success(), "the target process failed at its end: {status}");
        Ok(())
    }

    /// Says what became of a target that does not answer.
    #[cold]
    fn lost(&mut self, lost: Lost) -> anyhow::Error {
        match lost {
            Lost::Finished => anyhow!("the target was told to end"),
            Lost::Gone(None) => self.gone(),
            Lost::Gone(Some(error)) => self.gone().context(error),
            Lost::Silent(patience) => anyhow!(
                "the target process {} has not answered for {patience:?}; is the machine overloaded, or \
                 was the process stopped?",
                self.child.id()
            ),
            Lost::Unreadable(error) => {
                anyhow::Error::new(error).context("the target's stdout cannot be read")
            }
            Lost::Garbled { line, why } => {
                anyhow!("the target said {line:?}, which is no answer: {why}")
            }
            Lost::Refused { why } => anyhow!("the target refused an order: {why}"),
        }
    }

    /// Says how the target ended, when it should not have.
    #[cold]
    fn gone(&mut self) -> anyhow::Error {
        match self.end() {
            Ok(status) => anyhow!(
                "the target process ended before its time ({status}); its own message, if any, is above"
            ),
            Err(error) => error,
        }
    }

    fn end(&mut self) -> Result<ExitStatus> {
        self.link.finish();
        let give_up = Instant::now() + FAREWELL;
        while Instant::now() < give_up {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            thread::sleep(Duration::from_millis(2));
        }
        self.child.kill()?;
        self.child.wait()?;
        bail!("the target process did not end within {FAREWELL:?} and was killed")
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // Whoever wanted to know how it ends has called `stop`.
        let _ = self.end();
    }
}

impl Obedient for Target {
    fn order(&mut self, order: Order) -> Result<()> {
        self.link.order(&order).map_err(|lost| self.lost(lost))
    }

    fn answer(&mut self, _len_bytes: usize) -> Result<Answer> {
        self.link.answer(PATIENCE).map_err(|lost| self.lost(lost))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn failure(rerun: &[&str]) -> String {
        let arguments = Cli::try_parse_from(["tensorferry", "demo", "--sizes", "4096"]).unwrap();
        let Command::Demo(arguments) = arguments.command else { panic!("{arguments:?}") };
        let rerun: Vec<OsString> = rerun.iter().map(OsString::from).collect();
        match Target::command(&arguments.resolve().unwrap(), &rerun).and_then(Target::start) {
            Ok(_) => panic!("{rerun:?} is no target"),
            Err(error) => format!("{error:#}"),
        }
    }

    #[test]
    fn what_is_no_target_is_an_error_that_says_why() {
        let text = failure(&[]);
        assert!(text.contains("the path of this program cannot be found out"), "{text}");
        let text = failure(&["/no/such/program"]);
        assert!(
            text.starts_with("the target process (/no/such/program) did not start: "),
            "{text}"
        );
        let text = failure(&["sh", "-c", "exit 3"]);
        assert!(
            text.starts_with("the target process ended before its time (exit status: 3)"),
            "{text}"
        );
        let text = failure(&["sh", "-c", "kill -s KILL $$"]);
        assert!(text.starts_with("the target process ended before its time (signal: 9"), "{text}");
        let text = failure(&["sh", "-c", "echo hello; cat"]);
        assert!(text.starts_with("the target said \"hello\", which is no answer"), "{text}");
        let text = failure(&["sh", "-c", r#"echo '{"answer":"filled"}'; cat"#]);
        assert!(
            text.starts_with("the target answered another order than was given: Filled"),
            "{text}"
        );
        let text = failure(&["sh", "-c", r#"echo '{"answer":"refused","why":"no"}'; cat"#]);
        assert_eq!(text, "the target refused an order: no");
        let text = failure(&["sh", "-c", r#"echo '{"answer":"failed","why":"no room"}'; cat"#]);
        assert_eq!(text, "the target did not start: no room");
    }
}
