//! A context that is current on a thread for a while: what was current before is current again afterwards.

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

use crate::context::Context;
use crate::driver::{CudaError, log_error};

/// While it lives, a context is current on this thread. When it is dropped, what the caller had current is so again: other
/// libraries of the process use that too.
#[must_use = "the context is current only while this lives"]
#[derive(Debug)]
pub struct Current<H: Deref<Target = Context> = Arc<Context>> {
    /// `None` where the context was current already: then nothing has to be put back.
    pushed: Option<H>,
    /// What is current is a thread's own.
    thread: PhantomData<*const ()>,
}

impl<H: Deref<Target = Context>> Current<H> {
    /// Makes a context current. `hold` is called only where it wasn't.
    ///
    /// # Errors
    /// The driver's. Nothing has changed then.
    pub(crate) fn enter(context: &Context, hold: impl FnOnce() -> H) -> Result<Current<H>, CudaError> {
        let already = context.calls().current()? == context.raw();
        if !already {
            context.calls().push(context.raw())?;
        }
        Ok(Current { pushed: (!already).then(hold), thread: PhantomData })
    }
}

impl<H: Deref<Target = Context>> Drop for Current<H> {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.pushed.as_ref().map(|context| context.calls().pop()) {
            log_error(&error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{FakeCalls, OWN};

    #[test]
    fn the_caller_s_context_is_current_again_whatever_happened_inside() {
        for before in [vec![], vec![7], vec![3, 7], vec![OWN]] {
            let calls = Arc::new(FakeCalls::default());
            calls.set_contexts(&before);
            let context = Context::fake(&calls);
            {
                let _outer = context.bind().unwrap();
                assert_eq!(calls.top(), Some(OWN));
                {
                    let _inner = context.bind().unwrap();
                    context.memory_info().unwrap();
                }
                assert_eq!(calls.top(), Some(OWN), "an inner one ends, and the outer one still holds");
                if before.last() != Some(&OWN) {
                    // A library inside replaces what is current, where that isn't its own.
                    calls.replace_top(9);
                }
            }
            assert_eq!(calls.contexts(), before);
        }
    }

    #[test]
    fn a_refused_push_leaves_nothing_to_put_back() {
        let calls = Arc::new(FakeCalls::default());
        calls.set_contexts(&[7]);
        let context = Context::fake(&calls);
        calls.refuse_pushes(true);
        assert!(context.bind().is_err());
        calls.refuse_pushes(false);
        assert_eq!(calls.contexts(), [7]);
    }
}
