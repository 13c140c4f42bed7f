//! A thread that keeps a [`Batcher`] going, for requests from any number of other threads.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Mutex as FairMutex, MutexGuard as FairMutexGuard};

use super::batcher::{Batcher, Event, RequestId};
use super::feed::{Feed, Request, Writer};
use crate::engine::{Engine, Limits};
use crate::error::{EngineError, Result};
use crate::options::GenerationOptions;
use crate::process::Process;

/// An engine that several threads use in turns. The lock is handed on fairly, so that nobody waits for more than a step.
pub type SharedEngine = Arc<FairMutex<Engine>>;

/// How long a server sleeps before it looks again, while others hold the pages that its requests need.
const BLOCKED: Duration = Duration::from_millis(2);

/// What callers ask of the engine's thread.
pub(super) enum Command {
    /// Take a request.
    Submit { ticket: u64, prompt: Vec<u32>, options: Box<GenerationOptions>, feed: Writer },
    /// End a request.
    Cancel(u64),
    /// End once the requests have, or end them all.
    Close { cancel: bool },
    /// Panic, as a bug would.
    #[cfg(test)]
    Panic,
}

/// Continuous generation for other threads. Dropping it cancels what is in work and waits for the step under way.
pub struct Server {
    limits: Limits,
    process: Process,
    commands: Sender<Command>,
    next: AtomicU64,
    closed: Arc<AtomicBool>,
    /// Disconnected once the thread has ended.
    ended: Mutex<Receiver<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts the thread. Others may go on using the engine: their calls take turns with the server's steps.
    ///
    /// # Errors
    /// The operating system's, if it refuses a thread.
    pub fn start(engine: SharedEngine) -> std::io::Result<Server> {
        let limits = engine.lock().limits();
        let (sender, receiver) = channel();
        let closed = Arc::new(AtomicBool::new(false));
        let (flag, (alive, ended)) = (closed.clone(), channel::<()>());
        let thread = std::thread::Builder::new().name("headrace-serve".into()).spawn(move || {
            Worker { engine, batcher: Batcher::new(), feeds: HashMap::new(), tickets: HashMap::new() }.run(&receiver);
            flag.store(true, Ordering::Release);
            drop(alive);
        })?;
        Ok(Server {
            limits,
            process: Process::current(),
            commands: sender,
            next: AtomicU64::new(0),
            closed,
            ended: Mutex::new(ended),
            thread: Some(thread),
        })
    }

    /// Takes a request; its tokens come as soon as its turn has.
    ///
    /// # Errors
    /// As [`Engine::start`], but for the pages, for which it waits; [`EngineError::Closed`].
    pub fn submit(&self, prompt: Vec<u32>, options: GenerationOptions) -> Result<Request> {
        self.process.check()?;
        self.limits.check(&prompt, &options)?;
        if self.closed.load(Ordering::Acquire) {
            return Err(EngineError::Closed);
        }
        let ticket = self.next.fetch_add(1, Ordering::Relaxed);
        let feed = Arc::new(Feed::default());
        let submit = Command::Submit { ticket, prompt, options: Box::new(options), feed: Writer(feed.clone()) };
        self.commands.send(submit).map_err(|_| EngineError::Closed)?;
        Ok(Request { ticket, feed, commands: self.commands.clone(), process: self.process })
    }

    /// Takes no further request from now on. Those that there are go on to their ends, or with `cancel` end now.
    pub fn close(&self, cancel: bool) {
        self.closed.store(true, Ordering::Release);
        if !self.process.is_current() {
            return;
        }
        // Fails if the thread has ended already.
        let _ = self.commands.send(Command::Close { cancel });
    }

    /// Waits at most `patience` for the end of the thread after [`Server::close`]; true if it has ended.
    pub fn wait_closed(&self, patience: Duration) -> bool {
        if !self.process.is_current() {
            return true;
        }
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(ended.recv_timeout(patience), Err(RecvTimeoutError::Disconnected))
    }

    /// True once it takes no further request.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close(true);
        if !self.process.is_current() {
            // A fork has no such thread to wait for.
            std::mem::forget(self.thread.take());
        }
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            log::error!("the server's thread panicked");
        }
    }
}

/// What the thread works with.
struct Worker {
    engine: SharedEngine,
    batcher: Batcher,
    feeds: HashMap<RequestId, (u64, Writer)>,
    tickets: HashMap<u64, RequestId>,
}

impl Worker {
    fn run(mut self, commands: &Receiver<Command>) {
        let mut closing = false;
        loop {
            let first = match self.batcher.is_idle() {
                true if closing => return,
                // Callers hold a sender each: without one nobody waits for anything.
                true => match commands.recv() {
                    Ok(command) => Some(command),
                    Err(_) => return,
                },
                false if self.batcher.is_blocked() => match commands.recv_timeout(BLOCKED) {
                    Ok(command) => Some(command),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => return,
                },
                false => None,
            };
            let shared = self.engine.clone();
            let mut engine = shared.lock();
            let work = catch_unwind(AssertUnwindSafe(|| {
                for command in first.into_iter().chain(commands.try_iter()) {
                    closing |= self.obey(command, &mut engine);
                }
                self.batcher.step(&mut engine)
            }));
            let (events, broken) = match work {
                Ok(events) => (events, false),
                Err(panic) => (self.give_up(panic.as_ref(), &mut engine), true),
            };
            FairMutexGuard::unlock_fair(engine);
            events.into_iter().for_each(|event| self.tell(event));
            if broken {
                return;
            }
        }
    }

    /// True if the command is to close.
    fn obey(&mut self, command: Command, engine: &mut Engine) -> bool {
        match command {
            Command::Submit { ticket, prompt, options, feed } => match self.batcher.submit(engine, prompt, *options) {
                Ok(id) => {
                    self.feeds.insert(id, (ticket, feed));
                    self.tickets.insert(ticket, id);
                }
                Err(error) => feed.0.ended(Err(Arc::new(error))),
            },
            Command::Cancel(ticket) => {
                if let Some(&id) = self.tickets.get(&ticket) {
                    self.batcher.cancel(engine, id);
                }
            }
            Command::Close { cancel } => {
                if cancel {
                    self.tickets.values().for_each(|&id| {
                        self.batcher.cancel(engine, id);
                    });
                }
                return true;
            }
            #[cfg(test)]
            Command::Panic => unreachable!("as it was told"),
        }
        false
    }

    fn tell(&mut self, event: Event) {
        let (Event::Started { id, .. } | Event::Token { id, .. } | Event::Ended { id, .. }) = event;
        let Some((ticket, feed)) = self.feeds.get(&id) else { return };
        match event {
            Event::Started { waited, .. } => feed.0.started(waited),
            Event::Token { token, .. } => feed.0.token(token),
            Event::Ended { outcome, .. } => {
                feed.0.ended(outcome);
                self.tickets.remove(ticket);
                self.feeds.remove(&id);
            }
        }
    }

    /// Ends every request after a panic, which is a bug of this crate.
    fn give_up(&mut self, panic: &(dyn std::any::Any + Send), engine: &mut Engine) -> Vec<Event> {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref().copied());
        let what = text.unwrap_or("no message").to_string();
        log::error!("the server ends after a panic: {what}");
        let end = AssertUnwindSafe(|| self.batcher.abandon(engine, EngineError::Internal(what)));
        catch_unwind(end).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use headrace_testing::{ModelShape, random_model};

    use super::super::News;
    use super::*;
    use crate::options::{DeviceChoice, EngineOptions};
    use crate::run::FinishReason;

    const LONG: Duration = Duration::from_secs(60);

    fn engine() -> SharedEngine {
        let options = EngineOptions {
            device: DeviceChoice::Cpu,
            threads: Some(1),
            max_batch: 3,
            prefill_chunk: 8,
            ..EngineOptions::default()
        };
        let model = Arc::new(random_model(5, &ModelShape::default()));
        Arc::new(FairMutex::new(Engine::from_spec(model, None, options).unwrap()))
    }

    fn sequences(engine: &SharedEngine) -> u64 {
        engine.lock().stats().unwrap().kv.sequences
    }

    #[test]
    fn closing_waits_for_what_was_submitted() {
        let engine = engine();
        let server = Server::start(engine.clone()).unwrap();
        let prompts: Vec<Vec<u32>> = (1..20).map(|n| (0..n).collect()).collect();
        let requests: Vec<_> =
            prompts.iter().map(|p| server.submit(p.clone(), GenerationOptions::greedy(9)).unwrap()).collect();
        server.close(false);
        assert!(matches!(server.submit(vec![1], GenerationOptions::greedy(1)), Err(EngineError::Closed)));
        assert!(server.wait_closed(LONG));
        for (request, prompt) in requests.iter().zip(&prompts) {
            let got = request.outcome(Duration::ZERO).unwrap().unwrap();
            let alone = engine.lock().generate(prompt, GenerationOptions::greedy(9), &mut |_| Ok(())).unwrap();
            assert_eq!(got.token_ids, alone.token_ids);
            assert_eq!(request.tokens(), alone.token_ids);
            assert_eq!(request.wait(9, Duration::ZERO), News::Ended);
        }
        assert_eq!(sequences(&engine), 0);
    }

    #[test]
    fn what_is_let_go_is_cancelled() {
        let engine = engine();
        let server = Server::start(engine.clone()).unwrap();
        let request = server.submit(vec![1, 2, 3], GenerationOptions::default()).unwrap();
        assert!(matches!(request.wait(3, LONG), News::Token(_)));
        drop(request);
        let other: Vec<_> = (0..5).map(|_| server.submit(vec![1, 2], GenerationOptions::default()).unwrap()).collect();
        assert!(matches!(other[0].wait(0, LONG), News::Token(_)));
        drop(server);
        for request in other {
            assert_eq!(request.outcome(Duration::ZERO).unwrap().unwrap().finish, FinishReason::Cancelled);
        }
        assert_eq!(sequences(&engine), 0);
    }

    #[test]
    fn news_wakes_whoever_polled() {
        let server = Server::start(engine()).unwrap();
        let request = server.submit(vec![1, 2, 3], GenerationOptions::greedy(40)).unwrap();
        let mut at = 0;
        loop {
            let (sender, woken) = channel();
            match request.poll(at, move || sender.send(()).unwrap_or_default()) {
                News::Token(_) => at += 1,
                News::Ended => break,
                News::Pending => woken.recv_timeout(LONG).unwrap(),
            }
        }
        assert_eq!(at, 40);
    }

    #[test]
    fn polls_in_vain_keep_one_wake_however_many_they_are() {
        let engine = engine();
        let server = Server::start(engine.clone()).unwrap();
        let (kept, calls) = (Arc::new(()), Arc::new(AtomicU64::new(0)));
        let request = {
            // Nothing changes while the engine is held.
            let _held = engine.lock();
            let request = server.submit(vec![1, 2, 3], GenerationOptions::greedy(4)).unwrap();
            for _ in 0..10_000 {
                let (own, calls) = (kept.clone(), calls.clone());
                let wake = move || {
                    calls.fetch_add(1, Ordering::Relaxed);
                    drop(own);
                };
                assert_eq!(request.poll(0, wake), News::Pending);
            }
            assert_eq!(Arc::strong_count(&kept), 2, "one of them is kept");
            request
        };
        assert!(request.outcome(LONG).unwrap().is_ok());
        assert_eq!((calls.load(Ordering::Relaxed), Arc::strong_count(&kept)), (1, 1));
    }

    #[test]
    fn a_panic_becomes_the_error_of_every_request() {
        let engine = engine();
        let server = Server::start(engine.clone()).unwrap();
        let requests: Vec<_> =
            (0..5).map(|_| server.submit(vec![1, 2], GenerationOptions::default()).unwrap()).collect();
        assert!(matches!(requests[0].wait(0, LONG), News::Token(_)));
        server.commands.send(Command::Panic).unwrap();
        for request in &requests {
            let error = request.outcome(LONG).unwrap().unwrap_err();
            assert!(matches!(*error, EngineError::Internal(_)), "{error}");
        }
        assert!(server.wait_closed(LONG));
        assert!(server.submit(vec![1], GenerationOptions::greedy(1)).is_err());
        assert_eq!(sequences(&engine), 0);
        engine.lock().generate(&[1], GenerationOptions::greedy(1), &mut |_| Ok(())).unwrap();
    }
}
