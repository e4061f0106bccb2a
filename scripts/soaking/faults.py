"""What goes wrong during a soak, drawn from its seed: networks, processes, engines."""

from __future__ import annotations

import threading

from soaking.stage import TIMEOUT, Stage, Target

PAUSE = threading.Event()
#: How far into a connection it is cut: within headers, answers and payloads, and later.
OFFSETS = [0, 1, 8, 23, 24, 25, 32, 4000, 70_000, 1 << 20, 20 << 20]


def rest(seconds: float) -> None:
    PAUSE.wait(seconds)


class Faults:
    """Makes one thing go wrong after the other. Each is over when its method returns, but for what it has caused."""

    def __init__(self, stage: Stage, spoil: bool):
        self.stage, self.rng = stage, stage.rng
        self.counts: dict[str, int] = {}
        self.kinds = [
            (self.slow, 4), (self.cut, 6), (self.stall, 2), (self.kill, 4), (self.closed, 2), (self.idle, 2),
            (self.mute, 1), (self.freeze, 2), (self.death, 2), (self.reopen, 1), (self.new_arena, 2), (self.calm, 3),
        ]
        if spoil:
            self.kinds = [(self.spoil, 1)]

    def next(self) -> None:
        methods, weights = zip(*self.kinds)
        method = self.rng.choices(methods, weights)[0]
        name = method.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        method()

    def _target(self) -> Target:
        return self.rng.choice(self.stage.targets)

    def _copies(self):
        return self.rng.choice([None, 0, 1])

    def _ruled(self, seconds: float, **rule) -> None:
        target, copies = self._target(), self._copies()
        target.relay.rule(copies=copies, **rule)
        rest(seconds)
        target.relay.rule(copies=copies, port=rule.get("port", "data"))

    def _way(self) -> str:
        return self.rng.choice(["to_target", "to_initiator", "both"])

    # Of the network

    def slow(self) -> None:
        rule = self.rng.choice([
            {"delay_ms": self.rng.randrange(1, 50)},
            {"rate": self.rng.choice([1, 1000, 100_000, 10_000_000])},
            {"single_bytes": True},
            {"single_bytes": True, "rate": 20_000, "delay_ms": 3},
        ])
        self._ruled(self.rng.uniform(0.1, 1.2), way=self._way(), **rule)

    def cut(self) -> None:
        end = self.rng.choice(["fin", "rst", "silence", "half_close", "stall"])
        port = self.rng.choice(["data", "data", "data", "control"])
        connections = self.rng.choice(["future", "all"])
        after = {"bytes": self.rng.choice(OFFSETS), "end": end}
        self._ruled(self.rng.uniform(0.1, 1.0), way=self._way(), port=port, connections=connections, after=after)

    def stall(self) -> None:
        self._ruled(self.rng.uniform(0.1, 1.5), way=self._way(), stall=True)

    def kill(self) -> None:
        self._target().relay.kill(self.rng.choice(["fin", "rst", "silence"]), copies=self._copies())
        rest(self.rng.uniform(0.05, 0.5))

    def closed(self) -> None:
        relay, copies, port = self._target().relay, self._copies(), self.rng.choice(["data", "control"])
        relay.accept(self.rng.choice(["refuse", "silent", "never"]), copies=copies, port=port)
        relay.kill("rst", copies=copies, port=port)
        rest(self.rng.uniform(0.1, 1.2))
        relay.accept("pass", copies=copies, port=port)

    def idle(self) -> None:
        relay, copies = self._target().relay, self._copies()
        relay.idle(self.rng.randrange(20, 300), self.rng.choice(["fin", "rst", "silence"]), copies=copies)
        rest(self.rng.uniform(0.3, 1.2))
        relay.idle(None, copies=copies)

    def mute(self) -> None:
        """Nothing passes anywhere for a while."""
        for target in self.stage.targets:
            target.relay.rule(stall=True)
        rest(self.rng.uniform(0.1, 1.0))
        for target in self.stage.targets:
            target.relay.rule()

    # Of processes and engines

    def freeze(self) -> None:
        process = self._target().process
        process.freeze()
        try:
            # Now and then for longer than batches have.
            rest(self.rng.choice([0.1, 0.5, 1.0, 2.0, TIMEOUT + 1.0]))
        finally:
            process.thaw()

    def death(self) -> None:
        """A target is killed, and comes again at the same ports with other memory."""
        mortal = self.stage.mortal
        for initiator in self.stage.of(mortal):
            initiator.do("doubt", key=mortal.key)
        mortal.kill()
        rest(self.rng.uniform(0.0, 1.0))
        mortal.restart()
        for initiator in self.stage.of(mortal):
            mortal.make_arena(initiator)
            initiator.renew(mortal)

    def reopen(self) -> None:
        self.rng.choice([i for i in self.stage.initiators if i.library is None]).do("reopen")

    def new_arena(self) -> None:
        replace_arena(self.stage, *self.rng.choice(self.stage.pairs()))

    def calm(self) -> None:
        rest(self.rng.uniform(0.2, 1.0))

    def spoil(self) -> None:
        """For the proof that wrong bytes are found: no version of the protocol notices them."""
        self._ruled(2.0, way=self._way(), corrupt={"every": 1_000_003})

    def clear(self) -> None:
        """Takes everything back, and ends the connections that are silent for ever."""
        for target in self.stage.targets:
            for port in ("data", "control"):
                target.relay.rule(port=port)
                target.relay.accept("pass", port=port)
                target.relay.idle(None, port=port)
            target.relay.kill("rst")


def replace_arena(stage: Stage, initiator, target: Target) -> None:
    """Compares all that an initiator knows of its memory at a target with what is there, and gives it new memory."""
    images = initiator.do("hold", key=target.key, folder=str(stage.folder), seconds=20)
    name, _ = target.arenas[initiator.key]
    stage.findings.problems += target.drop_closed()
    target.closed = [name]
    found = target.process.do("soaking.load:close_arena", 60, name=name, images=images)
    stage.findings.problems += found["problems"]
    stage.findings.compared += found["checked"]
    stage.findings.arenas += 1
    target.make_arena(initiator)
    initiator.renew(target)
    initiator.do("release", key=target.key)


def replace_unknown(stage: Stage) -> None:
    """New memory where too little is known of the old."""
    for initiator, target in stage.pairs():
        if initiator.do("unknown", key=target.key) > 0.4:
            replace_arena(stage, initiator, target)
