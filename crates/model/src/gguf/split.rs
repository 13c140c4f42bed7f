//! Models in several files: finds the sibling shards of one shard, and checks that they belong together.

use std::path::{Path, PathBuf};

use crate::error::{ModelError, Result};
use crate::gguf::fault;
use crate::gguf::header::GgufFile;

const NO: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// Opens the model that `path` is a file of: all its shards, in order. Any shard may be given.
pub(super) fn open(path: &Path) -> Result<Vec<GgufFile>> {
    let given = GgufFile::open(path)?;
    let count = shard_count(&given)?;
    if count == 1 {
        return Ok(vec![given]);
    }
    let given_no = shard_no(&given, count)?;
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let Some(prefix) = name.strip_suffix(&suffix(given_no, count)) else {
        let what = format!(
            "shard {} of {count} must be named `…{}` so that the others can be found",
            given_no + 1,
            suffix(given_no, count)
        );
        return Err(given.key_error(NO, what));
    };
    let sibling = |no| path.with_file_name(format!("{prefix}{}", suffix(no, count)));
    let mut shards = Vec::new();
    let mut given = Some(given);
    for no in 0..count {
        let shard = match given.take_if(|_| no == given_no) {
            Some(shard) => shard,
            None => open_sibling(sibling(no), count)?,
        };
        check(&shard, shards.first(), no, count)?;
        shards.push(shard);
    }
    check_total(&shards)?;
    Ok(shards)
}

/// Checks a model that was given as one file's bytes.
pub(super) fn single(file: GgufFile) -> Result<Vec<GgufFile>> {
    match shard_count(&file)? {
        1 => Ok(vec![file]),
        n => Err(file.key_unsupported(COUNT, format!("one shard of {n}; open it by its path"))),
    }
}

fn suffix(no: usize, count: usize) -> String {
    format!("-{:05}-of-{count:05}.gguf", no + 1)
}

fn shard_count(file: &GgufFile) -> Result<usize> {
    match file.uint(COUNT)? {
        None => Ok(1),
        Some(n @ 1..=65_535) => Ok(n as usize),
        Some(n) => Err(file.key_error(COUNT, format!("{n} shards; 1 to 65535 are possible"))),
    }
}

fn shard_no(file: &GgufFile, count: usize) -> Result<usize> {
    match file.uint(NO)?.map(usize::try_from) {
        Some(Ok(no)) if no < count => Ok(no),
        Some(_) => Err(file.key_error(NO, format!("is not below the number of shards, {count}"))),
        None => Err(file.key_error(NO, format!("missing in a shard of {count}"))),
    }
}

fn open_sibling(path: PathBuf, count: usize) -> Result<GgufFile> {
    if !path.exists() {
        let what = format!("this shard is missing; the model has {count} shards, all of which must lie in one folder");
        return Err(fault::format(&path, None, None, what));
    }
    GgufFile::open(&path)
}

fn check(shard: &GgufFile, first: Option<&GgufFile>, no: usize, count: usize) -> Result<()> {
    let got = shard_count(shard)?;
    if got != count {
        return Err(shard.key_error(COUNT, format!("{got} shards, but another shard of this model says {count}")));
    }
    let got = shard_no(shard, count)?;
    if got != no {
        return Err(shard.key_error(NO, format!("is {got}, but by its name this is shard number {no}")));
    }
    const ARCH: &str = "general.architecture";
    if let (Some(first), Some(arch)) = (first, shard.string(ARCH)?)
        && first.string(ARCH)? != Some(arch)
    {
        return Err(shard.key_error(ARCH, "differs from the first shard's"));
    }
    Ok(())
}

fn check_total(shards: &[GgufFile]) -> Result<()> {
    let found: usize = shards.iter().map(|s| s.tensors.len()).sum();
    for shard in shards {
        match shard.uint(TENSORS)? {
            Some(n) if n != found as u64 => {
                return Err(shard.key_error(TENSORS, format!("{n} tensors, but the shards hold {found}")));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Error for a name that two shards describe.
pub(super) fn described_twice(shard: &GgufFile, name: &str, at: usize) -> ModelError {
    fault::format(&shard.file.path, Some(name), Some(at), "tensor described in two shards")
}
