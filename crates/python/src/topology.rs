//! Which memory nodes this machine has, in the form that programs for existing engines read.

use std::fs;
use std::path::Path;

const NODES: &str = "/sys/devices/system/node";

/// One entry per memory node, each with two lists of network devices, which are empty: TCP needs none
/// to be chosen.
pub(crate) fn describe() -> String {
    text(&nodes(Path::new(NODES)))
}

/// The nodes in the order of their numbers; node 0 where the kernel says nothing.
fn nodes(folder: &Path) -> Vec<u32> {
    let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let number = |name: std::ffi::OsString| name.to_str()?.strip_prefix("node")?.parse().ok();
    let mut nodes: Vec<u32> = names.filter_map(number).collect();
    nodes.sort_unstable();
    if nodes.is_empty() { vec![0] } else { nodes }
}

fn text(nodes: &[u32]) -> String {
    let entry = |node: &u32| format!("\t\"cpu:{node}\" : \n\t[\n\t\t[],\n\t\t[]\n\t]");
    let entries: Vec<String> = nodes.iter().map(entry).collect();
    format!("{{\n{}\n}}\n", entries.join(",\n"))
}
