//! Times steps of a GGUF model on the host: `step_times MODEL [THREADS] [PROMPT] [DECODE] [int8|int16] [BATCH]`, by the
//! wall clock and by the processor's, which a busy machine disturbs less. `BATCH` sequences decode together. With
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
    let path = args.get(1).ok_or("usage: step_times MODEL [THREADS] [PROMPT] [DECODE] [int8|int16] [BATCH]")?;
    let number = |i: usize, default: usize| args.get(i).map_or(Ok(default), |a| a.parse::<usize>());
    let (threads, prompt, decode, batch) = (number(2, 0)?, number(3, 512)?, number(4, 64)?, number(6, 1)?.max(1));
    let width = match args.get(5).map(String::as_str) {
        Some("int8") => ActivationWidth::Int8,
        Some("int16") | None => ActivationWidth::Int16,
        Some(other) => return Err(format!("activations {other}").into()),
    };
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
        let program = file_program(&model, prompt.max(batch), batch, width, 1);
        let pages = batch * geometry.pages_for(prompt + decode + 1);
        cpu.resize(RangeKind::Workspace, program.workspace_bytes(config))?;
        cpu.resize(RangeKind::Kv, (pages * geometry.page_bytes()) as u64)?;
        let id = cpu.record(program)?;
        let tables = (0..pages as u32).collect::<Vec<u32>>();
        Ok((cpu, id, tables.chunks(pages / batch).map(<[u32]>::to_vec).collect::<Vec<_>>()))
    };
    let (mut cpu, id, page_tables) = open()?;
    println!("{:?}", cpu.info());
    let mut output = StepOutput::default();
    let row = |position: usize, token: u32| TokenRow { sequence: 0, position, token: token.into() };
    let mut position = 0;
    if prompt > 0 {
        let rows: Vec<TokenRow> = (0..prompt).map(|i| row(i, (i as u32 * 37) % config.vocab as u32)).collect();
        let input = StepInput { rows, page_tables: page_tables.clone(), wanted: vec![prompt - 1], want_logits: false };
        for _ in 0..3 {
            let (start, busy) = (Instant::now(), processor_seconds());
            cpu.run(id, &input, &mut output)?;
            let (time, busy) = (start.elapsed().as_secs_f64(), processor_seconds() - busy);
            let rate = |seconds: f64| prompt as f64 / seconds;
            println!(
                "prefill of {prompt}: {:.1} ms, {:.0} tokens/s; {:.1} ms and {:.0} by processor time",
                time * 1e3,
                rate(time),
                busy * 1e3,
                rate(busy)
            );
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
    let busy = processor_seconds();
    for _ in 0..decode {
        let input = StepInput {
            rows: (0..batch).map(|sequence| TokenRow { sequence, position, token: token.into() }).collect(),
            page_tables: page_tables.clone(),
            wanted: (0..batch).collect(),
            want_logits: false,
        };
        let start = Instant::now();
        cpu.run(id, &input, &mut output)?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        token = output.tokens.first().copied().transpose().map_err(|i| format!("logit {i}"))?.unwrap_or(1);
        position += 1;
    }
    let busy = (processor_seconds() - busy) * 1e3 / decode.max(1) as f64;
    times.sort_by(f64::total_cmp);
    let (fastest, median) = (times.first().copied().unwrap_or(0.0), times.get(times.len() / 2).copied().unwrap_or(0.0));
    println!("decode of {batch}: fastest {fastest:.2} ms, median {median:.2} ms; {busy:.2} ms by processor time");
    println!("{}", cpu.profile().unwrap_or_default());
    Ok(())
}

/// Seconds of processor time that this process has used.
fn processor_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `clock_gettime` writes the one `timespec` that it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
