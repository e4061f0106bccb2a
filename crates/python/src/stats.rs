//! What an engine knows of a peer, as dicts.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tensorferry::{Engine, LaneStats, LastError, PeerStats, Version};

/// What an engine has done so far: its counters by name, and in `"peers"` a dict for every peer by its name.
pub(crate) fn all<'py>(py: Python<'py>, engine: &Engine) -> PyResult<Bound<'py, PyDict>> {
    let stats = PyDict::new(py);
    for (name, value) in engine.stats().to_pairs() {
        stats.set_item(name, value)?;
    }
    let peers = PyDict::new(py);
    for each in py.detach(|| engine.peers()) {
        peers.set_item(&*each.name, peer(py, &each)?)?;
    }
    stats.set_item("peers", peers)?;
    Ok(stats)
}

/// How the engine stands with one peer.
fn peer<'py>(py: Python<'py>, peer: &PeerStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("state", peer.state.as_str())?;
    let lanes = peer.lanes.iter().map(|each| lane(py, each)).collect::<PyResult<Vec<_>>>()?;
    dict.set_item("lanes", PyList::new(py, lanes)?)?;
    dict.set_item("lanes_known", peer.lanes_known)?;
    dict.set_item("requests_running", peer.requests_running)?;
    dict.set_item("batches_queued", peer.batches_queued)?;
    dict.set_item("requests_queued", peer.requests_queued)?;
    dict.set_item("bytes_queued", peer.bytes_queued)?;
    dict.set_item("notifications_queued", peer.notifications_queued)?;
    dict.set_item("descriptor_age", peer.descriptor_age.map(|age| age.as_secs_f64()))?;
    dict.set_item("next_lane_in", peer.next_lane_in.map(|time| time.as_secs_f64()))?;
    let last = peer.last_error.as_ref().map(|last| last_error(py, last)).transpose()?;
    dict.set_item("last_error", last)?;
    for (name, value) in peer.counters.to_pairs() {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

fn lane<'py>(py: Python<'py>, lane: &LaneStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("address", lane.address.to_string())?;
    dict.set_item("version", if lane.version == Version::V1 { 1 } else { 2 })?;
    dict.set_item("state", lane.state.as_str())?;
    dict.set_item("closing", lane.closing)?;
    dict.set_item("io_thread", lane.io_thread)?;
    dict.set_item("slices_in_flight", lane.slices_in_flight)?;
    dict.set_item("bytes_in_flight", lane.bytes_in_flight)?;
    dict.set_item("slices_done", lane.slices_done)?;
    dict.set_item("bytes_done", lane.bytes_done)?;
    dict.set_item("quiet_for", lane.quiet_for.as_secs_f64())?;
    Ok(dict)
}

fn last_error<'py>(py: Python<'py>, last: &LastError) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("code", last.code)?;
    dict.set_item("text", &last.text)?;
    dict.set_item("age", last.age.as_secs_f64())?;
    Ok(dict)
}
