//! Steps submitted before the one before was collected: chosen tokens, the order of results, and what is refused.
#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking

mod host_rig;

use headrace_ep_cpu::host_device::HostDevice;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::argmax::argmax;
use headrace_numerics::elementwise::KvDtype;
use headrace_provider::{DeviceError, Provider, StepInput, StepOutput, Ticket, Token, TokenRow};
use headrace_testing::{ModelShape, Oracle};
use host_rig::{PAGES, Rig, options};

fn row(position: usize, token: Token) -> StepInput {
    StepInput {
        rows: vec![TokenRow { sequence: 0, position, token }],
        page_tables: vec![(0..PAGES as u32).collect()],
        wanted: vec![0],
        want_logits: false,
    }
}

fn refused<T: std::fmt::Debug>(result: Result<T, DeviceError>, what: &str) {
    match result {
        Err(DeviceError::Invalid { what: said, .. }) => assert!(said.contains(what), "{said}"),
        other => panic!("{what}: {other:?}"),
    }
}

#[test]
fn chosen_tokens_are_those_of_the_step_before() {
    let shape = ModelShape::default();
    let mut rig = Rig::new(HostDevice::new(options(2)).unwrap(), &shape, 2, 31);
    let model = rig.model.clone();
    let oracle = Oracle::new(&model, ActivationWidth::Int16, KvDtype::F16);
    let (mut sequence, mut token, mut expected) = (oracle.sequence(), 3, Vec::new());
    for _ in 0..12 {
        token = argmax(&oracle.token(&mut sequence, token)).unwrap() as u32;
        expected.push(token);
    }
    // Everything streams: the tail of each step copies the head of the next.
    let id = rig.begin(3).unwrap();
    let device = &mut rig.device;
    let most = device.max_in_flight();
    assert!(most >= 2);
    refused(device.submit(id, &row(0, Token::Chosen(0))), "chose 0 tokens");
    let mut tickets: Vec<Ticket> = Vec::new();
    let mut output = StepOutput::default();
    let mut got = Vec::new();
    for position in 0..12 {
        let token = if position == 0 { Token::Id(3) } else { Token::Chosen(0) };
        tickets.push(device.submit(id, &row(position, token)).unwrap());
        if tickets.len() == most {
            refused(device.submit(id, &row(position + 1, Token::Chosen(0))), "in flight");
            refused(device.collect(tickets[1], &mut output), "not the first in flight");
            device.collect(tickets.remove(0), &mut output).unwrap();
            got.extend(output.tokens.iter().copied().map(Result::unwrap));
        }
    }
    refused(
        device.submit(id, &row(12, Token::Chosen(0))).and_then(|t| device.collect(t, &mut output)),
        "first in flight",
    );
    for ticket in tickets {
        device.collect(ticket, &mut output).unwrap();
        got.extend(output.tokens.iter().copied().map(Result::unwrap));
        refused(device.collect(ticket, &mut output), "in flight");
    }
    assert_eq!(got, expected);
}

#[test]
fn nothing_follows_logits_that_were_not_collected() {
    let mut rig = Rig::new(HostDevice::new(options(1)).unwrap(), &ModelShape::default(), 2, 32);
    let id = rig.begin(2).unwrap();
    let device = &mut rig.device;
    let ticket = device.submit(id, &StepInput { want_logits: true, ..row(0, Token::Id(1)) }).unwrap();
    refused(device.submit(id, &row(1, Token::Chosen(0))), "logits");
    let mut output = StepOutput::default();
    device.collect(ticket, &mut output).unwrap();
    let chosen = output.tokens[0].unwrap();
    assert_eq!(argmax(&output.logits), Ok(chosen as usize));
    refused(device.submit(id, &row(1, Token::Chosen(1))), "wanted row 1");
    let ticket = device.submit(id, &row(1, Token::Chosen(0))).unwrap();
    device.collect(ticket, &mut output).unwrap();
    let fed_back = output.clone();
    device.run(id, &row(1, Token::Id(chosen)), &mut output).unwrap();
    assert_eq!(output, fed_back);
}
