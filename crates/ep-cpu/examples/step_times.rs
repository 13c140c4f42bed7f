//! Times steps of a GGUF model on the host: `step_times MODEL [THREADS] [PROMPT] [DECODE]`. With
//! `HEADRACE_PROFILE_OPS=1` it says where the time goes.

use std::sync::Arc;
use std::time::Instant;

use headrace_ep_cpu::{CpuOptions, CpuProvider};
use headrace_kv::KvGeometry;
use headrace_kv::geometry::KvLayout;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::elementwise::KvDtype;
use headrace_provider::{Provider, RangeKind, StepInput, StepOutput, TokenRow};
use headrace_testing::file_program;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().collect();
    let path = args.get(1).ok_or("usage: step_times MODEL [THREADS] [PROMPT] [DECODE]")?;
    let number = |i: usize, default: usize| args.get(i).map_or(Ok(default), |a| a.parse::<usize>());
    let (threads, prompt, decode) = (number(2, 0)?, number(3, 512)?, number(4, 64)?);
    let model = Arc::new(headrace_model::gguf::load(path.as_ref())?.spec);
    let config = &model.config;
    let geometry = KvGeometry {
        layers: model.layers.len(),
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        dtype: KvDtype::F16,
        layout: KvLayout::HeadMajor,
        page_tokens: KvGeometry::DEFAULT_PAGE_TOKENS,
    };
    let open = || -> Result<_, Box<dyn std::error::Error>> {
        let threads = Some(threads).filter(|&t| t > 0);
        let mut cpu = CpuProvider::new(CpuOptions { threads, level: None })?;
        cpu.attach(model.clone(), geometry)?;
        let program = file_program(&model, prompt.max(1), 1, ActivationWidth::Int16, 1);
        let pages = geometry.pages_for(prompt + decode + 1);
        cpu.resize(RangeKind::Workspace, program.workspace_bytes(config))?;
        cpu.resize(RangeKind::Kv, (pages * geometry.page_bytes()) as u64)?;
        let id = cpu.record(program)?;
        Ok((cpu, id, vec![(0..pages as u32).collect::<Vec<u32>>()]))
    };
    let (mut cpu, id, page_tables) = open()?;
    println!("{:?}", cpu.info());
    let mut output = StepOutput::default();
    let row = |position: usize, token: u32| TokenRow { sequence: 0, position, token };
    let mut position = 0;
    if prompt > 0 {
        let rows: Vec<TokenRow> = (0..prompt).map(|i| row(i, (i as u32 * 37) % config.vocab as u32)).collect();
        let input = StepInput { rows, page_tables: page_tables.clone(), wanted: vec![prompt - 1], want_logits: false };
        for _ in 0..3 {
            let start = Instant::now();
            cpu.run(id, &input, &mut output)?;
            let time = start.elapsed().as_secs_f64();
            println!("prefill of {prompt}: {:.1} ms, {:.0} tokens/s", time * 1e3, prompt as f64 / time);
        }
        position = prompt;
        println!("{}", cpu.profile().unwrap_or_default());
        // The decode steps get a profile of their own.
        let pages = vec![0u8; cpu.mapped(RangeKind::Kv) as usize];
        let mut pages = pages;
        cpu.read(RangeKind::Kv, 0, &mut pages)?;
        cpu = open()?.0;
        cpu.write(RangeKind::Kv, 0, &pages)?;
    }
    let mut token = output.tokens.first().copied().transpose().map_err(|i| format!("logit {i}"))?.unwrap_or(1);
    let mut times = Vec::with_capacity(decode);
    for _ in 0..decode {
        let input = StepInput {
            rows: vec![row(position, token)],
            page_tables: page_tables.clone(),
            wanted: vec![0],
            want_logits: false,
        };
        let start = Instant::now();
        cpu.run(id, &input, &mut output)?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        token = output.tokens.first().copied().transpose().map_err(|i| format!("logit {i}"))?.unwrap_or(1);
        position += 1;
    }
    times.sort_by(f64::total_cmp);
    println!("decode: fastest {:.2} ms, median {:.2} ms", times[0], times[times.len() / 2]);
    println!("{}", cpu.profile().unwrap_or_default());
    Ok(())
}
