//! The document for people: sections of lines that fit 100 columns.

use std::fmt::{self, Display, Formatter};

use comfy_table::{ColumnConstraint, ContentArrangement, Table, Width, presets};

use super::Document;
use super::addresses::{Addresses, Host, Interface};
use super::gpus::{Device, Tried, Vendor};
use super::paths::{Engines, Staging};
use super::proof::Proof;
use super::sockets::{Limit, Ports, Sockets};
use crate::args::size_text;

const COLUMNS: u16 = 100;
/// Wide enough for what stands at the left of any section.
const LEFT: u16 = 22;

impl Display for Document {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "tensorferry {} on {}", self.version, self.machine)?;
        section(f, "Moved to find out", self.proofs.iter().map(proof))?;
        section(f, "GPU libraries", self.gpu.vendors.iter().flat_map(vendor))?;
        section(f, "Data paths, from memory to memory", self.path_lines())?;
        section(f, "Sockets and limits", sockets(&self.sockets))?;
        section(f, "Addresses of this machine", interfaces(&self.addresses))?;
        section(f, "What an engine makes of a host", self.addresses.hosts.iter().map(host))?;
        section(f, "Settings in the environment", self.settings_lines())?;
        let advice = self.advice.iter().map(|text| ("advice".into(), text.clone()));
        let problems = self.problems.iter().map(|text| ("PROBLEM".into(), text.clone()));
        section(f, "In short", advice.chain(problems).chain([self.verdict()]))
    }
}

impl Document {
    fn settings_lines(&self) -> Vec<Line> {
        let settings = &self.settings;
        let set = settings.environment.iter();
        let mut lines: Vec<Line> =
            set.map(|one| ("set".into(), format!("{}={}", one.name, one.value))).collect();
        lines.extend(settings.warnings.iter().map(|text| ("warning".into(), text.clone())));
        lines.extend(settings.without_effect.iter().map(|text| ("no effect".into(), text.clone())));
        if lines.is_empty() {
            lines.push(("none".into(), "every setting has its default".into()));
        }
        lines
    }

    /// Pairs that take the same way share a line.
    fn path_lines(&self) -> Vec<Line> {
        let mut ways: Vec<(Engines, &str, Vec<String>)> = Vec::new();
        for path in self.paths.iter().filter(|path| path.moves) {
            let pair = format!("{} to {}", path.from, path.to);
            match ways.iter_mut().find(|(of, how, _)| (*of, *how) == (path.engines, path.how)) {
                Some((_, _, pairs)) => pairs.push(pair),
                None => ways.push((path.engines, path.how, vec![pair])),
            }
        }
        let way = |(engines, how, pairs): (Engines, &str, Vec<String>)| {
            let engines = if engines == Engines::Two { "two engines" } else { "one engine" };
            (engines.into(), format!("{}: {how}", pairs.join(", ")))
        };
        let mut lines: Vec<Line> = ways.into_iter().map(way).collect();
        if self.gpu.devices().next().is_some() {
            let Staging { slots, slot_bytes } = self.staging;
            let size = size_text(slot_bytes as u64);
            let text =
                format!("through {slots} pinned slots of {size} for each device and direction");
            lines.push(("staged".into(), text));
        }
        let none = self.gpu.vendors.iter().filter(|vendor| !vendor.usable);
        lines.extend(none.map(|vendor| {
            (format!("any with {}", vendor.vendor), format!("none: {}, see above", vendor.state))
        }));
        lines
    }

    fn verdict(&self) -> Line {
        let devices = match self.gpu.devices().count() {
            0 => "no GPU can be used".to_owned(),
            1 => "one GPU can be used".to_owned(),
            many => format!("{many} GPUs can be used"),
        };
        let host = match self.proofs.iter().any(|proof| proof.memory == "cpu" && proof.moved) {
            true => "host memory moves",
            false => "host memory does NOT move",
        };
        ("verdict".into(), format!("{host}; {devices}"))
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

fn vendor(vendor: &Vendor) -> Vec<Line> {
    let mut lines =
        vec![(format!("{}: {}", vendor.of.spoken(), vendor.state), vendor.text.clone())];
    lines.extend(vendor.devices.iter().map(device));
    let mut add = |what: &str, text: String| {
        if !text.is_empty() {
            lines.push((format!("  {what}"), text));
        }
    };
    match &vendor.tried[..] {
        // The text names it.
        [] | [_] => {}
        // The text names all of them, and has the first answer.
        [first, others @ ..] if vendor.state == "missing" => {
            add("other answers", answers(others.iter().filter(|one| answer(one) != answer(first))));
        }
        all => add("tried", answers(all.iter())),
    }
    add("lacks", vendor.absent_functions.join(", "));
    let settings = vendor.settings.iter().map(|one| format!("{}={}", one.name, one.value));
    add("because of", settings.collect::<Vec<_>>().join(", "));
    lines
}

/// Each file and what came of it; files with the same answer that follow each other share it.
fn answers<'a>(tried: impl Iterator<Item = &'a Tried>) -> String {
    let tried: Vec<&Tried> = tried.collect();
    let alike = tried.chunk_by(|one, next| answer(one) == answer(next));
    let texts = alike.map(|alike| {
        let names: Vec<&str> = alike.iter().map(|one| one.name.as_str()).collect();
        format!("{}: {}", names.join(", "), answer(alike[0]))
    });
    texts.collect::<Vec<_>>().join("; ")
}

/// A loader's answer without the name of the file, which it begins with.
fn answer(tried: &Tried) -> &str {
    let rest = tried.answer.strip_prefix(&tried.name).and_then(|rest| rest.strip_prefix(": "));
    rest.unwrap_or(&tried.answer)
}

fn device(device: &Device) -> Line {
    let known = [
        device.name.clone(),
        device.memory_bytes.map(size_text),
        device.integrated.then(|| "integrated".to_owned()),
        device.pci_address.as_ref().map(|address| format!("PCI {address}")),
        device.uuid.as_ref().map(|uuid| format!("UUID {uuid}")),
    ];
    (format!("  {}", device.device), known.into_iter().flatten().collect::<Vec<_>>().join(", "))
}

fn sockets(sockets: &Sockets) -> Vec<Line> {
    let outgoing = sockets.outgoing_ports.as_ref().map(|ports| {
        let overlap = match ports.overlap {
            0 => "none of the engine's range".to_owned(),
            some => format!("{some} of them in the engine's range"),
        };
        format!("{}-{}, {overlap}", ports.first, ports.last)
    });
    let bytes = |n: Option<u64>| n.map(size_text);
    let three = |n: Option<[u64; 3]>| n.map(|n| n.map(size_text).join(", "));
    let backlog = |most| format!("{most}; the engine asks for {}", sockets.listen_backlog);
    let maximal = match (bytes(sockets.rmem_max_bytes), bytes(sockets.wmem_max_bytes)) {
        (Some(receive), Some(send)) => Some(format!("{receive}, {send}; the engine sets no sizes")),
        _ => None,
    };
    let ipv6 = if sockets.ipv6 { "yes" } else { "no: all interfaces are those of IPv4" };
    let pinned = "; pinned memory of GPUs does not count";
    let lines = [
        ("ports", Some(ports(&sockets.ports))),
        ("outgoing ports", outgoing),
        ("IPv6", Some(ipv6.to_owned())),
        ("open files", Some(limit(sockets.open_files, |n| n.to_string()))),
        ("locked memory", Some(limit(sockets.locked_memory_bytes, size_text) + pinned)),
        ("tcp_rmem", three(sockets.tcp_rmem_bytes)),
        ("tcp_wmem", three(sockets.tcp_wmem_bytes)),
        ("rmem_max, wmem_max", maximal),
        ("somaxconn", sockets.somaxconn.map(backlog)),
    ];
    let known = |(name, text): (&str, Option<String>)| {
        (name.to_owned(), text.unwrap_or_else(|| "unknown".into()))
    };
    lines.into_iter().map(known).collect()
}

fn ports(ports: &Ports) -> String {
    let Ports { first, last, address, tried, free, .. } = ports;
    let all = ports.len();
    let how = if *tried == all { "each was tried" } else { "as many of them were tried" };
    let place = match address.is_unspecified() {
        true => "all interfaces".to_owned(),
        false => address.to_string(),
    };
    let refused = ports.refused.as_ref().map(|why| format!("; {why}")).unwrap_or_default();
    format!("{first}-{last}: {free} of {tried} can be bound on {place} ({how}){refused}")
}

fn limit(limit: Limit, shown: impl Fn(u64) -> String) -> String {
    let text = |n: Option<u64>| n.map_or_else(|| "no limit".to_owned(), &shown);
    match limit {
        Limit { soft, hard } if soft == hard => text(soft),
        Limit { soft, hard } => format!("{}, can be raised to {}", text(soft), text(hard)),
    }
}

fn interfaces(addresses: &Addresses) -> Vec<Line> {
    if let Some(error) = &addresses.interfaces_error {
        return vec![("unknown".into(), error.clone())];
    }
    let one = |one: &Interface| {
        let mtu = one.mtu_bytes.map(|mtu| format!(", MTU {mtu}")).unwrap_or_default();
        let speed = one.megabits_per_second.map(|speed| format!(", {speed} Mbit/s"));
        (one.interface.clone(), format!("{}{mtu}{}", one.address, speed.unwrap_or_default()))
    };
    let none = || vec![("none".into(), "no interface has an address".into())];
    let lines: Vec<Line> = addresses.interfaces.iter().map(one).collect();
    if lines.is_empty() { none() } else { lines }
}

fn host(host: &Host) -> Line {
    let what = match host.what {
        "hostname" => " (this machine's name)",
        "route" => " (where other networks are)",
        _ => "",
    };
    let mut said = Vec::new();
    if host.segment.is_some() {
        let listens = match host.listens_on {
            Some(ip) if ip.is_unspecified() => "listens on ALL interfaces".to_owned(),
            Some(ip) => format!("listens on {ip} only"),
            None => "where it listens is not known".to_owned(),
        };
        said.push(format!("{listens}, peers are told {}", host.advertised()));
    }
    if !host.looked_up.is_empty() {
        let found: Vec<String> = host.looked_up.iter().map(ToString::to_string).collect();
        said.push(format!("looked up here it is {}", found.join(", ")));
    }
    said.extend(host.error.clone());
    (host.host.clone(), format!("{}{what}", said.join("; ")))
}
