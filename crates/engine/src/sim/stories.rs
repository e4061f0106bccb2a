//! Schedules that are told step by step: what random ones have found, so rarely that it needs a test of its own.

use std::time::Duration;

use tensorferry_wire::{Op, Status, Version};

use crate::sim::memory::Arena;
use crate::sim::net::{self, CONTROL_PORT, EndId, Net, StreamEnd};
use crate::sim::plan::Plan;
use crate::sim::world::{Kind, Outcome, World};

/// Tells a story of two machines with one thread each, between which there is a lane.
fn tell(story: impl Fn(&mut World<'_>) -> Outcome) {
    let arena = Arena::new();
    for seed in 0..20 {
        let calm = Plan::of(seed).made_calm();
        let plan = Plan { machines: 2, threads: 1, lanes: 1, version: Version::V2, ..calm };
        let mut world = World::new(seed, plan, &arena);
        let told = ready(&mut world).and_then(|()| story(&mut world));
        drop(world);
        let net = Net::finish().expect("begun above");
        assert!(told.is_ok(), "seed {seed}: {told:?}\n{}", net.trace.to_text());
    }
}

fn ready(world: &mut World<'_>) -> Outcome {
    let first = world.submit_plain(0, 1)?.expect("there is memory for a first batch");
    world.drive(|world| !World::is_running(&world.sent[first])).map(drop)
}

impl World<'_> {
    /// The thread of a process does all that it can without others.
    fn run_alone(&mut self, process: usize) -> Outcome {
        while self.runnable().contains(&(process, 0)) {
            self.processes[process].turn(process, 0)?;
        }
        Ok(())
    }

    fn deliver_all(&mut self) {
        while self.deliver_some() {}
    }
}

/// A lane is idle and was offered, so whoever submits next needs nobody else.
#[test]
fn a_small_batch_leaves_without_the_io_thread_and_its_deadline_is_kept_all_the_same() {
    tell(|world| {
        world.run_alone(0)?;
        let write = |world: &mut World<'_>| {
            world.ask_for(0, 1, (Op::Write, 50, Kind::Good)).expect("there is memory")
        };
        let (first, second) = (write(world), write(world));
        let (soon, minute) = (Duration::from_millis(10), Duration::from_secs(60));
        let index = world.submit(0, 1, vec![first], minute, false)?.expect("there is room");
        if world.runnable().contains(&(0, 0)) {
            return Err("the IO thread was woken".to_owned());
        }
        world.drive(|world| !World::is_running(&world.sent[index]))?;
        world.run_alone(0)?;
        // Nobody answers this one, and its end comes before the offer's.
        let index = world.submit(0, 1, vec![second], soon, false)?.expect("there is room");
        if !world.runnable().contains(&(0, 0)) {
            return Err("nobody looks after the deadline".to_owned());
        }
        world.drive(|world| !World::is_running(&world.sent[index])).map(drop)
    });
}

/// The IO thread has not run since, and has not heard of it.
#[test]
fn what_has_come_before_a_batch_was_submitted_answers_nothing_of_it() {
    let endings: [fn(&mut Net, EndId); 5] = [
        |net, peer| net.pipe(peer).sent.extend(Status::Applied.encode()),
        |net, peer| net.pipe(peer).sent.extend(Status::Rejected.encode()),
        |net, peer| net.pipe(peer).sent.extend([7]),
        |net, peer| net.half_close(peer),
        |net, peer| net.pipe(peer).end = StreamEnd::Reset,
    ];
    for end in endings {
        tell(|world| {
            world.run_alone(0)?;
            let said = net::with(|net| {
                let is_lane = |conn: &usize| net.conns[*conn].to.port() != CONTROL_PORT;
                let lane = net.live.iter().copied().find(is_lane);
                lane.map(|conn| end(net, EndId { conn, side: 1 }))
            });
            said.expect("there is a lane");
            world.deliver_all();
            let index = world.submit_plain(0, 1)?.expect("there is memory");
            // Nothing is wrong with it, so it has to be whole.
            world.drive(|world| !World::is_running(&world.sent[index])).map(drop)
        });
    }
}

/// How an IO thread waits depends on it.
#[test]
fn a_thread_knows_whether_it_is_in_the_middle_of_a_payload() {
    tell(|world| {
        let flowing = |world: &World<'_>| {
            [0, 1].map(|process| world.processes[process].flowing(0).expect("counted right"))
        };
        world.plan.chunk = 7;
        for op in [Op::Write, Op::Read] {
            // Where the payload goes to.
            let to = usize::from(op == Op::Write);
            let request = world.ask_for(0, 1, (op, 50, Kind::Good)).expect("there is memory");
            let minute = Duration::from_secs(60);
            let index = world.submit(0, 1, vec![request], minute, false)?.expect("there is room");
            let mut halfway = false;
            world.drive(|world| {
                halfway |= flowing(world)[to] == 1;
                !World::is_running(&world.sent[index])
            })?;
            world.run_alone(0)?;
            world.run_alone(1)?;
            if flowing(world) != [0, 0] {
                return Err(format!("after a {op:?}: {:?}", flowing(world)));
            }
            if !halfway {
                return Err(format!("nothing was in the middle of a {op:?}"));
            }
        }
        Ok(())
    });
}

/// Others have requests, for which it waits as ever.
#[test]
fn a_payload_that_has_halted_does_not_decide_how_a_thread_waits() {
    tell(|world| {
        world.plan.chunk = 7;
        let request = world.ask_for(0, 1, (Op::Write, 50, Kind::Good)).expect("there is memory");
        let minute = Duration::from_secs(60);
        let index = world.submit(0, 1, vec![request], minute, false)?.expect("there is room");
        world.drive(|world| world.processes[1].flowing(0) == Some(1))?;
        if !world.processes[1].awaits_payload(0) {
            return Err("it is in the middle of one".to_owned());
        }
        net::with(|net| net.now += Duration::from_secs(1));
        if world.processes[1].flowing(0) != Some(1) || world.processes[1].awaits_payload(0) {
            return Err("it has halted".to_owned());
        }
        world.drive(|world| !World::is_running(&world.sent[index])).map(drop)
    });
}

/// What a submitting thread finds in the queue and cannot send waits there for a newer descriptor, which may never come.
#[test]
fn what_a_submitting_thread_sets_aside_has_its_deadline_kept() {
    tell(|world| {
        world.run_alone(0)?;
        let stray = world.ask_for(0, 1, (Op::Write, 50, Kind::Stray)).expect("there is memory");
        let second = Duration::from_secs(1);
        let index = world.submit(0, 1, vec![stray], second, false)?.expect("there is room");
        let begin = world.now();
        // The peer is frozen: it is not asked to do anything.
        while World::is_running(&world.sent[index]) {
            world.run_alone(0)?;
            let next = world.processes[0].wakes().min().ok_or("nobody keeps its deadline")?;
            net::with(|net| net.now = net.now.max(next));
            if world.now() > begin + 2 * second {
                return Err("it is running, long after its deadline".to_owned());
            }
        }
        Ok(())
    });
}

/// The thread takes in the last answer of a batch, then looks for what is to stop, and then is asked to notify.
#[test]
fn a_batch_that_is_told_to_stop_before_its_notification_is_asked_for_ends_at_once() {
    tell(|world| {
        let read = world.ask_for(0, 1, (Op::Read, 50, Kind::Good)).expect("there is memory");
        let minute = Duration::from_secs(60);
        let index = world.submit(0, 1, vec![read], minute, true)?.expect("there is room");
        world.run_alone(0)?;
        world.deliver_all();
        world.run_alone(1)?;
        world.deliver_all();
        world.submit_plain(0, 1)?;
        world.cancel(index);
        world.run_alone(0)?;
        if World::is_running(&world.sent[index]) { Err("it is running".to_owned()) } else { Ok(()) }
    });
}
