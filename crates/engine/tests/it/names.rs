//! Peers whose hosts have names that nobody answers for.

use std::net::UdpSocket;
use std::process::Command;

use tensorferry::{Config, HostBuffer, Op};
use tensorferry_wire::SegmentDescriptor;

use crate::common::{PROMPT, Pair, engine, ms, start, start_within, timed};
use crate::fake::{BASE, Fake};

/// More than there are threads for them.
const PEERS: usize = 12;

/// Runs a test of this program in namespaces of its own, in which the only name server is 127.0.0.1.
const INSIDE: &str = r#"
ip link set lo up && printf 'nameserver 127.0.0.1\noptions timeout:30 attempts:1\n' >"$1" &&
mount --bind "$1" /etc/resolv.conf && exec "$2" "$3" --exact --ignored --nocapture --test-threads=1
"#;

#[test]
fn hosts_that_are_looked_up_for_ever_hold_up_no_other_peer() {
    let apart = || {
        let mut command = Command::new("unshare");
        command.args(["--net", "--mount", "sh", "-c"]);
        command
    };
    let possible = apart().arg("ip link set lo up").output();
    if !possible.is_ok_and(|o| o.status.success()) {
        eprintln!("skipped: it needs root, unshare and ip to have a name server of its own");
        return;
    }
    let file = std::env::temp_dir().join(format!("ferry-resolv-{}", std::process::id()));
    let ran = apart()
        .args([INSIDE, "sh"])
        .arg(&file)
        .arg(std::env::current_exe().unwrap())
        .arg("names::hosts_that_are_looked_up_for_ever_inside")
        .output()
        .unwrap();
    let _ = std::fs::remove_file(&file);
    let said = String::from_utf8_lossy(&ran.stdout);
    let complained = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success() && said.contains("1 passed"), "{said}\n{complained}");
}

#[test]
#[ignore = "needs a name server that does not answer, so it is started in namespaces of its own"]
fn hosts_that_are_looked_up_for_ever_inside() {
    let server = UdpSocket::bind("127.0.0.1:53").unwrap();
    server.set_read_timeout(Some(ms(10_000))).unwrap();
    let e = engine(Config::default());
    let local = HostBuffer::zeroed(64).unwrap();
    let peers: Vec<Fake> = (0..PEERS).map(slow_peer).collect();
    let waiting: Vec<_> = peers
        .iter()
        .map(|peer| {
            let segment = e.segment(&peer.name()).unwrap();
            start_within(&segment, Op::Write, &local, BASE, ms(4000))
        })
        .collect();
    // As many names are being looked up as can be.
    for _ in 0..8 {
        server.recv(&mut [0; 512]).unwrap();
    }
    for host in ["127.0.0.1", "localhost"] {
        let good = Pair::new(64);
        let port = good.target.control_port();
        let (result, took) = timed(|| {
            let segment = e.open(&format!("{host}:{port}"))?;
            start(&segment, Op::Write, &local, good.remote.addr()).wait()
        });
        result.unwrap();
        assert!(took < ms(2500), "{host}: {took:?}");
    }
    for (batch, peer) in waiting.iter().zip(&peers) {
        let error = batch.wait().unwrap_err();
        assert_eq!(error.code(), 13, "{error}");
        assert!(error.to_string().contains(&peer.name()), "{error}");
    }
    let ((), took) = timed(|| drop(e));
    assert!(took < PROMPT, "the engine took {took:?} to end");
}

/// A peer that says its data port is at a host that has to be looked up.
fn slow_peer(i: usize) -> Fake {
    let peer = Fake::new(|mut link| link.serve());
    peer.publish(|d: &mut SegmentDescriptor| d.tcp_data_host = Some(format!("slow{i}.example")));
    peer
}
