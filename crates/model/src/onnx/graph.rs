//! The graph as something to ask: who makes this value, what are a node's inputs and attributes, what is left over.
//!
//! Whoever recognises a node claims it, and takes its attributes one by one. What nobody claimed or took is an error.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

use super::Origin;
use super::initializers::{Initializers, Type};
use super::proto::{Attribute, GraphProto, Node, TensorProto, attribute_kind};
use crate::error::{ModelError, Result};

/// ONNX Runtime's own operators.
pub const MICROSOFT: &str = "com.microsoft";

/// An index over the nodes of one graph.
pub struct Graph<'a> {
    pub origin: &'a Origin<'a>,
    proto: &'a GraphProto,
    producer: HashMap<&'a str, (usize, usize)>,
    inputs: HashSet<&'a str>,
    claimed: RefCell<Vec<bool>>,
}

/// The attributes of one node that nobody took yet.
pub struct Attributes<'g, 'a> {
    graph: &'g Graph<'a>,
    node: usize,
    left: HashMap<&'a str, &'a Attribute>,
}

impl<'a> Graph<'a> {
    /// Indexes a graph.
    ///
    /// # Errors
    /// `Format` if a name is defined twice, used without a definition, or if the graph has a cycle.
    pub fn new(proto: &'a GraphProto, init: &Initializers<'a>, origin: &'a Origin<'a>) -> Result<Graph<'a>> {
        let mut inputs = HashSet::new();
        for v in &proto.input {
            if init.contains(&v.name) {
                return Err(origin.unsupported(
                    Some(v.name.clone()),
                    "a graph input that is also an initializer (a weight that callers may replace)",
                ));
            }
            if !inputs.insert(v.name.as_str()) {
                return Err(origin.format(Some(&v.name), "two graph inputs have this name"));
            }
        }
        let mut producer = HashMap::new();
        for (n, node) in proto.node.iter().enumerate() {
            for (o, name) in node.output.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
                if inputs.contains(name.as_str())
                    || init.contains(name)
                    || producer.insert(name.as_str(), (n, o)).is_some()
                {
                    return Err(origin.format(Some(name), "this value is defined twice"));
                }
            }
        }
        let claimed = RefCell::new(vec![false; proto.node.len()]);
        let graph = Graph { origin, proto, producer, inputs, claimed };
        graph.refuse_cycles(init)?;
        Ok(graph)
    }

    /// Removes nodes whose inputs are all there, until none is left.
    fn refuse_cycles(&self, init: &Initializers<'_>) -> Result<()> {
        let nodes = &self.proto.node;
        let mut waits = vec![0usize; nodes.len()];
        let mut readers: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
        for (n, node) in nodes.iter().enumerate() {
            for name in node.input.iter().filter(|i| !i.is_empty()) {
                if let Some(&(p, _)) = self.producer.get(name.as_str()) {
                    waits[n] += 1;
                    readers[p].push(n);
                } else if !self.inputs.contains(name.as_str()) && !init.contains(name) {
                    return Err(self.format(n, format!("input {name:?} is made by no node and is no initializer")));
                }
            }
        }
        let mut ready: Vec<usize> = (0..nodes.len()).filter(|n| waits[*n] == 0).collect();
        let mut done = 0;
        while let Some(n) = ready.pop() {
            done += 1;
            for &r in &readers[n] {
                waits[r] -= 1;
                if waits[r] == 0 {
                    ready.push(r);
                }
            }
        }
        if done < nodes.len() {
            let at = waits.iter().position(|w| *w > 0).unwrap_or(0);
            return Err(self.format(at, "is part of, or behind, a cycle of the graph"));
        }
        Ok(())
    }

    /// Node number `n`.
    pub fn node(&self, n: usize) -> &'a Node {
        &self.proto.node[n]
    }

    /// The node's name and operator, for messages.
    pub fn label(&self, n: usize) -> String {
        let node = self.node(n);
        let name = if node.name.is_empty() { node.output.first() } else { Some(&node.name) };
        format!("{} ({})", name.map_or("a node without name", String::as_str), node.op_type)
    }

    /// A `Format` error about node `n`.
    pub fn format(&self, n: usize, what: impl Into<String>) -> ModelError {
        self.origin.format(Some(&self.label(n)), what)
    }

    /// An `Unsupported` error about node `n`.
    pub fn unsupported(&self, n: usize, what: impl Into<String>) -> ModelError {
        self.origin.unsupported(Some(self.label(n)), what)
    }

    /// True for a graph input.
    pub fn is_input(&self, value: &str) -> bool {
        self.inputs.contains(value)
    }

    /// The node that makes `value`, and which of its outputs it is.
    pub fn producer(&self, value: &str) -> Option<(usize, usize)> {
        self.producer.get(value).copied()
    }

    /// The node that makes `value`, if it is the operator `op` of `domain`.
    pub fn producer_of(&self, value: &str, domain: &str, op: &str) -> Option<usize> {
        self.producer(value).map(|(n, _)| n).filter(|n| self.is(*n, domain, op))
    }

    /// True if node `n` is the operator `op` of `domain`.
    pub fn is(&self, n: usize, domain: &str, op: &str) -> bool {
        let node = self.node(n);
        let own = if node.domain == "ai.onnx" { "" } else { node.domain.as_str() };
        node.op_type == op && own == domain && node.overload.is_empty()
    }

    /// Marks a node as understood; it must not have been before.
    pub fn claim(&self, n: usize) -> Result<Attributes<'_, 'a>> {
        if std::mem::replace(&mut self.claimed.borrow_mut()[n], true) {
            return Err(self.unsupported(n, "two parts of the decoder read this node"));
        }
        self.attributes(n)
    }

    /// Marks a node as understood; several parts may read it.
    pub fn claim_shared(&self, n: usize) -> Result<Attributes<'_, 'a>> {
        self.claimed.borrow_mut()[n] = true;
        self.attributes(n)
    }

    /// True if somebody claimed node `n`.
    pub fn is_claimed(&self, n: usize) -> bool {
        self.claimed.borrow()[n]
    }

    /// The first node that nobody claimed.
    pub fn unclaimed(&self) -> Option<usize> {
        self.claimed.borrow().iter().position(|c| !c)
    }

    fn attributes(&self, n: usize) -> Result<Attributes<'_, 'a>> {
        let mut left = HashMap::new();
        for a in &self.node(n).attribute {
            if left.insert(a.name.as_str(), a).is_some() {
                return Err(self.format(n, format!("attribute {:?} twice", a.name)));
            }
        }
        Ok(Attributes { graph: self, node: n, left })
    }

    /// Input `i` of node `n`; `None` where it is left out.
    pub fn input(&self, n: usize, i: usize) -> Option<&'a str> {
        self.node(n).input.get(i).map(String::as_str).filter(|s| !s.is_empty())
    }

    /// Input `i` of node `n`, which the operator needs.
    pub fn need(&self, n: usize, i: usize, what: &str) -> Result<&'a str> {
        self.input(n, i).ok_or_else(|| {
            self.format(
                n,
                format!(
                    "has no input {i} ({what}), which the operator needs ({} inputs given); \
                     ONNX Runtime refuses such a graph too",
                    self.node(n).input.len()
                ),
            )
        })
    }

    /// Refuses inputs from `max` on.
    pub fn at_most(&self, n: usize, max: usize) -> Result<()> {
        match self.node(n).input.iter().skip(max).find(|i| !i.is_empty()) {
            Some(extra) => Err(self.unsupported(n, format!("input {extra:?} beyond the {max} that are understood"))),
            None => Ok(()),
        }
    }

    /// Follows conversions between floating-point types back to the value they start from. Headrace computes in
    /// binary32 throughout, so they have no meaning of their own.
    pub fn through_casts(&self, mut value: &'a str) -> Result<&'a str> {
        while let Some(n) = self.producer_of(value, "", "Cast") {
            let mut a = self.attributes(n)?;
            let to = a.int("to")?;
            if !matches!(to, Some(1 | 10 | 16)) {
                return Err(self.unsupported(n, format!("attribute to = {to:?} on the path of the activations")));
            }
            a.ignore("saturate");
            a.ignore("round_mode");
            a.finish()?;
            self.at_most(n, 1)?;
            self.claim_shared(n)?;
            value = self.need(n, 0, "input")?;
        }
        Ok(value)
    }

    /// The whole numbers of a constant: a `Constant` node or an int64 initializer; `None` if `value` is neither.
    pub fn ints(&self, value: &str, init: &Initializers<'a>) -> Result<Option<Vec<i64>>> {
        if let Some(i) = init.take(value) {
            let t = init.get(i);
            if t.ty != Type::I64 || t.dims.len() > 1 {
                return Err(self.origin.format(Some(t.name), "a list of int64 numbers is needed here"));
            }
            let numbers = init.bytes(t.extent).chunks_exact(8);
            return Ok(Some(numbers.map(|c| c.iter().rev().fold(0i64, |v, b| v << 8 | i64::from(*b))).collect()));
        }
        let Some(n) = self.producer_of(value, "", "Constant") else { return Ok(None) };
        let mut a = self.claim_shared(n)?;
        let list = match (a.tensor("value")?, a.int("value_int")?, a.ints("value_ints")?) {
            (Some(t), None, None) => {
                constant_ints(t).ok_or_else(|| self.format(n, "attribute value is not a list of int64 numbers"))?
            }
            (None, Some(i), None) => vec![i],
            (None, None, Some(l)) => l.to_vec(),
            _ => return Err(self.unsupported(n, "a constant that is not a list of int64 numbers")),
        };
        a.finish()?;
        Ok(Some(list))
    }
}

/// The numbers of an int64 tensor held in an attribute.
fn constant_ints(t: &TensorProto) -> Option<Vec<i64>> {
    if t.data_type != 7 || t.dims.len() > 1 || t.data_location != 0 {
        return None;
    }
    let list = match &t.raw_data {
        Some(raw) if raw.len() % 8 == 0 => {
            raw.chunks_exact(8).map(|c| c.iter().rev().fold(0i64, |v, b| v << 8 | i64::from(*b))).collect()
        }
        Some(_) => return None,
        None => t.int64_data.clone(),
    };
    let count = t.dims.first().copied().unwrap_or(1);
    (usize::try_from(count) == Ok(list.len())).then_some(list)
}

impl<'a> Attributes<'_, 'a> {
    fn take(&mut self, name: &str, kind: i32) -> Result<Option<&'a Attribute>> {
        match self.left.remove(name) {
            Some(a) if (a.kind != kind && a.kind != 0) || !a.ref_attr_name.is_empty() => {
                Err(self.graph.format(self.node, format!("attribute {name} has type {}, not {kind}", a.kind)))
            }
            other => Ok(other),
        }
    }

    /// A whole number.
    pub fn int(&mut self, name: &str) -> Result<Option<i64>> {
        Ok(self.take(name, attribute_kind::INT)?.map(|a| a.i.unwrap_or(0)))
    }

    /// A number.
    pub fn float(&mut self, name: &str) -> Result<Option<f32>> {
        match self.take(name, attribute_kind::FLOAT)?.map(|a| a.f.unwrap_or(0.0)) {
            Some(f) if !f.is_finite() => Err(self.graph.format(self.node, format!("attribute {name} = {f}"))),
            other => Ok(other),
        }
    }

    /// Text; bytes that are no UTF-8 are shown as such.
    pub fn text(&mut self, name: &str) -> Result<Option<String>> {
        let a = self.take(name, attribute_kind::STRING)?;
        Ok(a.map(|a| a.s.as_ref().map_or_else(String::new, |s| String::from_utf8_lossy(s).into_owned())))
    }

    /// A list of whole numbers.
    pub fn ints(&mut self, name: &str) -> Result<Option<&'a [i64]>> {
        Ok(self.take(name, attribute_kind::INTS)?.map(|a| a.ints.as_slice()))
    }

    /// A tensor.
    pub fn tensor(&mut self, name: &str) -> Result<Option<&'a TensorProto>> {
        Ok(self.take(name, attribute_kind::TENSOR)?.and_then(|a| a.t.as_ref()))
    }

    /// A whole number that has only one acceptable value.
    pub fn only_int(&mut self, name: &str, default: i64, accepted: i64) -> Result<()> {
        let value = self.int(name)?.unwrap_or(default);
        if value != accepted {
            return Err(self
                .graph
                .unsupported(self.node, format!("attribute {name} = {value}; only {accepted} is supported")));
        }
        Ok(())
    }

    /// Drops an attribute that has no influence on the result.
    pub fn ignore(&mut self, name: &str) {
        self.left.remove(name);
    }

    /// Refuses whatever is left.
    pub fn finish(self) -> Result<()> {
        match self.left.keys().min() {
            Some(name) => Err(self.graph.unsupported(self.node, format!("attribute {name} is not understood"))),
            None => Ok(()),
        }
    }
}
