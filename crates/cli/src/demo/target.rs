//! The second process of the demo: memory that the initiator reads and writes.

use std::io;

use anyhow::{Context, Result};
use tensorferry::{Config, Engine, RegisterOptions};

use crate::args::DemoTargetArgs;
use crate::measure::link::write_line;
use crate::measure::obey::obey;
use crate::measure::orders::Answer;
use crate::memory::Buffer;

/// Obeys orders until stdin ends, which it does when the initiator goes, however it goes.
pub(crate) fn serve(args: &DemoTargetArgs, mut config: Config) -> Result<()> {
    // The initiator has the same environment, and says what is odd about it.
    config.notices.clear();
    let (engine, memory) = match set_up(args, config) {
        Ok(ready) => ready,
        // The initiator says it.
        Err(why) => {
            let why = crate::chain(&why);
            return Ok(write_line(&mut io::stdout(), &Answer::Failed { why })?);
        }
    };
    let ready = Answer::Ready {
        segment: engine.name().to_owned(),
        addr: memory.addr(),
        device: args.memory.device_name(&engine),
    };
    let done = obey(&memory, ready, &mut io::stdin().lock(), &mut io::stdout());
    engine.close();
    done
}

fn set_up(args: &DemoTargetArgs, config: Config) -> Result<(Engine, Buffer)> {
    let engine = Engine::new(&args.host, config).context("no engine")?;
    let bytes = usize::try_from(args.bytes.bytes()).context("more bytes than addresses")?;
    let memory = Buffer::for_demo(&engine, args.memory, bytes)?;
    memory.register(&engine, &RegisterOptions::default())?;
    Ok((engine, memory))
}
