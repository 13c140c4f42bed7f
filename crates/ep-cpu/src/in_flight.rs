//! Steps that ran when they were submitted, until their results are collected.

use std::collections::VecDeque;

use headrace_provider::{StepOutput, Ticket};

/// Results that wait, in the order of their steps.
#[derive(Debug, Default)]
pub struct InFlight {
    waiting: VecDeque<(Ticket, StepOutput)>,
    /// Outputs that are used again, so that a steady step allocates nothing.
    spare: Vec<StepOutput>,
    next: u64,
}

impl InFlight {
    /// An empty output to run a step into, if one step more may wait beside those that do, of which there are fewer than
    /// `most`.
    ///
    /// # Errors
    /// Says why the step has to wait.
    pub fn output(&mut self, most: usize) -> Result<StepOutput, String> {
        if self.waiting.len() >= most {
            return Err(format!("{} steps are in flight; {most} may be", self.waiting.len()));
        }
        if self.waiting.back().is_some_and(|(_, output)| !output.logits.is_empty()) {
            return Err("the logits of the step before were not collected".to_string());
        }
        let mut output = self.spare.pop().unwrap_or_default();
        output.tokens.clear();
        output.logits.clear();
        Ok(output)
    }

    /// Keeps the results of a step that ran; its ticket.
    pub fn keep(&mut self, output: StepOutput) -> Ticket {
        self.next += 1;
        self.waiting.push_back((Ticket(self.next), output));
        Ticket(self.next)
    }

    /// Moves the results of the step of `ticket` into `output`.
    ///
    /// # Errors
    /// Says which step comes first, if that isn't it.
    pub fn collect(&mut self, ticket: Ticket, output: &mut StepOutput) -> Result<(), String> {
        match self.waiting.pop_front() {
            Some((first, mut results)) if first == ticket => {
                std::mem::swap(output, &mut results);
                self.spare.push(results);
                Ok(())
            }
            Some(other) => {
                let first = other.0.0;
                self.waiting.push_front(other);
                Err(format!("step {} is not the first in flight, which is {first}", ticket.0))
            }
            None => Err(format!("step {} is not in flight", ticket.0)),
        }
    }
}
