//! The document for people: sections of lines that fit 100 columns.

use std::fmt::{self, Display, Formatter};

use comfy_table::{ColumnConstraint, ContentArrangement, Table, Width, presets};

use super::Document;
use super::proof::Proof;

const COLUMNS: u16 = 100;
/// Wide enough for what stands at the left of any section.
const LEFT: u16 = 22;

impl Display for Document {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "tensorferry {} on {}", self.version, self.machine)?;
        section(f, "Moved to find out", self.proofs.iter().map(proof))?;
        let problems = self.problems.iter().map(|text| ("PROBLEM".into(), text.clone()));
        section(f, "In short", problems.chain([self.verdict()]))
    }
}

impl Document {
    fn verdict(&self) -> Line {
        let host = match self.proofs.iter().any(|proof| proof.memory == "cpu" && proof.moved) {
            true => "host memory moves",
            false => "host memory does NOT move",
        };
        ("verdict".into(), host.into())
    }
}

/// What a line is about, and what there is to say.
type Line = (String, String);

fn section(
    f: &mut Formatter<'_>,
    title: &str,
    lines: impl IntoIterator<Item = Line>,
) -> fmt::Result {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_width(COLUMNS)
        .set_content_arrangement(ContentArrangement::Dynamic);
    table.add_rows(lines.into_iter().map(|(left, right)| [format!(" {left}"), right]));
    table.set_constraints([ColumnConstraint::Absolute(Width::Fixed(LEFT))]);
    writeln!(f, "\n{title}\n{}", table.trim_fmt())
}

fn proof(proof: &Proof) -> Line {
    let Proof { host, bytes, milliseconds, .. } = proof;
    let text = match &proof.error {
        None => format!(
            "yes: WRITE and READ of {bytes} bytes over TCP on {host}, every byte compared, \
             {milliseconds:.0} ms"
        ),
        Some(error) => format!("NO: {error}"),
    };
    (proof.memory.clone(), text)
}
