//! How an IO thread is told things.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

#[cfg(not(all(loom, test)))]
use mio::Waker;
use mio::{Poll, Token};

use crate::control::Question;
use crate::error::{Error, Result};
use crate::io::Socket;
use crate::io::lane::LaneReport;
use crate::local::Local;
use crate::peer::Peer;
use crate::registry::BufferInfo;
use crate::staging::Bell;
#[cfg(all(loom, test))]
use crate::sync::Waker;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, MutexGuard, locked};

/// What an IO thread can be told.
pub(crate) enum Command {
    /// Look at a peer's queue.
    Kick(Arc<Peer>),
    /// Give a peer's queue, which another thread looks after, to its lanes here.
    Help(Arc<Peer>),
    /// Make a lane to a peer whose queue another thread looks after.
    Dial(Arc<Peer>),
    /// Serve a connection that was accepted.
    Serve(Socket),
    /// Some batch is to stop: settle what is held of it.
    Sweep,
    /// Let go of a buffer.
    Revoke(BufferInfo),
    /// A staging slot or a copy that a connection waited for is there.
    Ring(Token),
    /// Others wait for staging slots: give back those whose bytes only wait for a socket.
    Relinquish,
    /// Descriptors are running out: give up connections that nobody needs.
    Spare,
    /// Ask a peer's control port something.
    Ask(Arc<Question>),
    /// Where the peer is that a question is for.
    Found(Arc<Question>, Result<Vec<SocketAddr>>),
    /// Ask a peer for its descriptor.
    Fetch(Arc<Peer>),
    /// Keep the deadlines of copies within the process.
    Watch(Arc<Local>),
    /// Say how the lanes are.
    Report(SyncSender<Vec<LaneReport>>),
    /// End.
    Stop,
}

/// How an IO thread is told things.
pub(crate) struct Mailbox {
    /// `None`: the thread has ended, and what is posted is dropped.
    commands: Mutex<Option<Vec<Command>>>,
    /// The thread is not asleep, or has been woken.
    pub(super) awake: AtomicBool,
    waker: Waker,
}

/// The token of what wakes the thread.
pub(super) const WAKER: Token = Token(0);

/// A poller and the mailbox that wakes it, for a thread that is started later.
pub(crate) fn prepare() -> Result<(Poll, Arc<Mailbox>)> {
    let poll = Poll::new().map_err(|e| Error::io("making a poller (epoll)", e))?;
    let waker =
        Waker::new(poll.registry(), WAKER).map_err(|e| Error::io("making a waker (eventfd)", e))?;
    let commands = Mutex::new(Some(Vec::new()));
    let mailbox = Mailbox { commands, awake: AtomicBool::new(true), waker };
    Ok((poll, Arc::new(mailbox)))
}

impl Mailbox {
    pub(crate) fn post(&self, command: Command) {
        match &mut *self.lock() {
            Some(commands) => commands.push(command),
            // A command that is kept holds its peer, and that the mailbox.
            None => return,
        }
        // SeqCst: pairs with `sleep`, which says "asleep" before it looks for commands a last time.
        if !self.awake.swap(true, Ordering::SeqCst) {
            // An eventfd of ours takes a write unless its counter is full, and then it is awake.
            let _ = self.waker.wake();
        }
    }

    pub(crate) fn take(&self) -> Vec<Command> {
        self.lock().as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Nothing is taken in after this; returns what was left.
    pub(super) fn shut(&self) -> Vec<Command> {
        self.lock().take().unwrap_or_default()
    }

    /// One with nothing but what is modelled, and what ends the thread's sleep.
    #[cfg(all(loom, test))]
    pub(crate) fn modelled() -> (Arc<Self>, Arc<crate::sync::Alarm>) {
        let (waker, commands) = (Waker::default(), Mutex::new(Some(Vec::new())));
        let alarm = Arc::clone(&waker.alarm);
        (Arc::new(Self { commands, awake: AtomicBool::new(true), waker }), alarm)
    }

    /// True if the thread may sleep: nothing was posted, and whoever posts from now on wakes it.
    pub(crate) fn sleep(&self) -> bool {
        // A swap, so that it also takes in what the last who posted has done.
        self.awake.swap(false, Ordering::SeqCst);
        let empty = self.lock().as_ref().is_none_or(Vec::is_empty);
        if !empty {
            self.awake.store(true, Ordering::SeqCst);
        }
        empty
    }

    /// Whether the thread has to look.
    #[cfg(test)]
    pub(crate) fn is_awake(&self) -> bool {
        self.awake.load(Ordering::SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Vec<Command>>> {
        locked(&self.commands)
    }
}

/// Wakes one connection of an IO thread.
pub(super) struct ConnBell {
    mailbox: Arc<Mailbox>,
    token: Token,
    /// It was rung, and the connection has not been woken yet.
    rung: AtomicBool,
}

/// Wakes the thread to look for what is due.
impl Bell for Mailbox {
    fn ring(&self) {
        self.post(Command::Sweep);
    }
}

impl ConnBell {
    pub(super) fn of(mailbox: &Arc<Mailbox>, token: Token) -> Arc<dyn Bell> {
        let mailbox = Arc::clone(mailbox);
        Arc::new(Self { mailbox, token, rung: AtomicBool::new(false) })
    }
}

impl Bell for ConnBell {
    fn ring(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            self.mailbox.post(Command::Ring(self.token));
        }
    }

    fn heard(&self) {
        self.rung.store(false, Ordering::Release);
    }
}
