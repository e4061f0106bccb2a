//! Moves blocks between two engines of one process and says how fast: `moves LOCAL REMOTE OP BLOCK BATCH ROUNDS`, where
//! LOCAL and REMOTE are `cpu` or a device such as `cuda:0`. Without a GPU, `SIMULATOR` names the file of a simulated
//! library.

#![allow(clippy::print_stdout, reason = "it is a program")]

use std::time::{Duration, Instant};

use tensorferry::gpu::{DeviceId, Location};
use tensorferry::{
    Config, DeviceBuffer, Engine, HostBuffer, Op, OwnedRequest, RegisterOptions, SubmitOptions,
};

enum Buffer {
    Host(HostBuffer),
    Device(DeviceBuffer),
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [local, remote, op, block, batch, rounds] = args.as_slice() else {
        return Err("usage: moves LOCAL REMOTE read|write BLOCK BATCH ROUNDS".into());
    };
    let op = if op == "read" { Op::Read } else { Op::Write };
    let (block, batch): (usize, usize) = (block.parse()?, batch.parse()?);
    let mut config = Config::from_env()?;
    if let Ok(file) = std::env::var("SIMULATOR") {
        config.gpu.cuda_library = Some(file.into());
    }
    let target = Engine::new("127.0.0.1", config.clone())?;
    let there = Buffer::new(&target, remote.parse()?, block * batch)?;
    there.register(&target)?;
    let initiator = Engine::new("127.0.0.1", config)?;
    let here = Buffer::new(&initiator, local.parse()?, block * batch)?;
    here.register(&initiator)?;
    let segment = initiator.open(target.name())?;
    let requests: Vec<OwnedRequest> = (0..batch)
        .map(|i| here.request(op, i * block, there.addr() + (i * block) as u64, block))
        .collect::<Result<_, _>>()?;
    let run = || segment.submit_owned(&requests, SubmitOptions::default())?.wait();
    run()?;
    let mut times: Vec<Duration> = Vec::new();
    let begin = Instant::now();
    for _ in 0..rounds.parse()? {
        let begin = Instant::now();
        run()?;
        times.push(begin.elapsed());
    }
    let rate = (block * batch * times.len()) as f64 / begin.elapsed().as_secs_f64() / 1e9;
    times.sort_unstable();
    println!(
        "{rate:.3} GB/s, p50 {:?}, p99 {:?}",
        times[times.len() / 2],
        times[times.len() * 99 / 100]
    );
    Ok(())
}

impl Buffer {
    fn new(engine: &Engine, at: Location, len: usize) -> tensorferry::Result<Self> {
        match at {
            Location::Device(device) => Self::on(engine, device, len),
            Location::Any | Location::Cpu => {
                let buffer = HostBuffer::zeroed(len)?;
                buffer.write(0, &vec![1; len]);
                Ok(Self::Host(buffer))
            }
        }
    }

    fn on(engine: &Engine, device: DeviceId, len: usize) -> tensorferry::Result<Self> {
        let buffer = engine.device_buffer(device, len)?;
        buffer.write(0, &vec![1; len])?;
        Ok(Self::Device(buffer))
    }

    fn register(&self, engine: &Engine) -> tensorferry::Result<()> {
        let options = RegisterOptions::default();
        match self {
            Self::Host(buffer) => engine.register_buffer(buffer, &options),
            Self::Device(buffer) => engine.register_device_buffer(buffer, &options),
        }
    }

    fn addr(&self) -> u64 {
        match self {
            Self::Host(buffer) => buffer.addr(),
            Self::Device(buffer) => buffer.addr(),
        }
    }

    fn request(
        &self,
        op: Op,
        offset: usize,
        remote: u64,
        len: usize,
    ) -> tensorferry::Result<OwnedRequest> {
        match self {
            Self::Host(buffer) => buffer.request(op, offset, remote, len),
            Self::Device(buffer) => buffer.request(op, offset, remote, len),
        }
    }
}
