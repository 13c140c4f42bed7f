//! The few nodes that turn `attention_mask` into the lengths that attention wants. Headrace knows its lengths; it
//! only makes sure that the graph means the same.

use std::cell::RefCell;
use std::collections::HashSet;

use super::graph::Graph;
use super::initializers::Initializers;
use crate::error::Result;

/// Checks of length inputs, each done once.
pub struct Mask<'a> {
    name: &'a str,
    seen: RefCell<HashSet<(&'a str, bool)>>,
}

impl<'a> Mask<'a> {
    /// `name` is the graph input that holds the mask.
    pub fn new(name: &'a str) -> Mask<'a> {
        Mask { name, seen: RefCell::default() }
    }

    /// `value` must be `Cast<int32>(Sub(ReduceSum(mask, [1]), 1))`: per sequence, its tokens so far less one.
    pub fn sequence_lengths(&self, g: &Graph<'a>, init: &Initializers<'a>, value: &'a str) -> Result<()> {
        if !self.seen.borrow_mut().insert((value, false)) {
            return Ok(());
        }
        let sub = self.cast_of(g, value, "Sub")?;
        g.claim_shared(sub)?.finish()?;
        self.one(g, init, sub, 1)?;
        let minuend = g.need(sub, 0, "A")?;
        let Some(sum) = g.producer_of(minuend, "", "ReduceSum") else {
            return Err(g.unsupported(sub, format!("{minuend:?} is not the sum of {}", self.name)));
        };
        let mut a = g.claim_shared(sum)?;
        a.int("keepdims")?;
        a.only_int("noop_with_empty_axes", 0, 0)?;
        a.finish()?;
        g.at_most(sum, 2)?;
        self.mask_input(g, sum)?;
        self.one(g, init, sum, 1)
    }

    /// `value` must be `Cast<int32>(Gather(Shape(mask), 1))`: the longest sequence.
    pub fn total_length(&self, g: &Graph<'a>, init: &Initializers<'a>, value: &'a str) -> Result<()> {
        if !self.seen.borrow_mut().insert((value, true)) {
            return Ok(());
        }
        let gather = self.cast_of(g, value, "Gather")?;
        let mut a = g.claim_shared(gather)?;
        a.only_int("axis", 0, 0)?;
        a.finish()?;
        self.one(g, init, gather, 1)?;
        let data = g.need(gather, 0, "data")?;
        let Some(shape) = g.producer_of(data, "", "Shape") else {
            return Err(g.unsupported(gather, format!("{data:?} is not the shape of {}", self.name)));
        };
        let mut a = g.claim_shared(shape)?;
        a.only_int("start", 0, 0)?;
        a.finish()?;
        g.at_most(shape, 1)?;
        self.mask_input(g, shape)
    }

    fn cast_of(&self, g: &Graph<'a>, value: &'a str, op: &str) -> Result<usize> {
        let Some(cast) = g.producer_of(value, "", "Cast") else {
            return Err(g.origin.unsupported(
                Some(value.to_string()),
                format!("a length of attention that is not made from {} by Cast and {op}", self.name),
            ));
        };
        let mut a = g.claim_shared(cast)?;
        a.only_int("to", 0, 6)?;
        a.ignore("saturate");
        a.finish()?;
        g.at_most(cast, 1)?;
        let inner = g.need(cast, 0, "input")?;
        match g.producer_of(inner, "", op) {
            Some(n) => {
                g.at_most(n, 2)?;
                Ok(n)
            }
            None => Err(g.unsupported(cast, format!("{inner:?} is not made by {op}, as in every known export"))),
        }
    }

    fn one(&self, g: &Graph<'a>, init: &Initializers<'a>, n: usize, input: usize) -> Result<()> {
        match g.ints(g.need(n, input, "constant")?, init)? {
            Some(list) if list == [1] => Ok(()),
            other => Err(g.unsupported(n, format!("input {input} is {other:?}, not the constant 1"))),
        }
    }

    fn mask_input(&self, g: &Graph<'a>, n: usize) -> Result<()> {
        match g.need(n, 0, "data")? {
            v if v == self.name && g.is_input(v) => Ok(()),
            v => Err(g.unsupported(n, format!("reads {v:?}, not {}", self.name))),
        }
    }
}
