//! Model files in memory: read-only mappings, small files read whole, and the few bytes that exist in no file as such.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use memmap2::Mmap;

use crate::error::{ModelError, Result};

/// Start of a file that Git LFS left in place of the real one.
const LFS_POINTER: &[u8] = b"version https://git-lfs";

/// Refuses a Git LFS pointer, whichever file of a model it stands for.
///
/// # Errors
/// `Format` if `bytes` are those of a pointer.
pub(crate) fn refuse_lfs_pointer(path: &Path, bytes: &[u8]) -> Result<()> {
    if !bytes.starts_with(LFS_POINTER) {
        return Ok(());
    }
    let what = "this is a Git LFS pointer, not the file itself; fetch the real one with `git lfs pull`".into();
    Err(ModelError::Format { path: path.to_path_buf(), tensor: None, offset: None, what })
}

/// Reads a small file of a model whole: configurations, vocabularies, templates.
///
/// # Errors
/// `Io` if it can't be read; `Format` if it has more than `limit` bytes or is a Git LFS pointer.
pub(crate) fn read_small(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let io = |source| ModelError::Io { path: path.to_path_buf(), source };
    let mut bytes = Vec::new();
    File::open(path).map_err(io)?.take(limit + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > limit {
        let what = format!("longer than {limit} bytes");
        return Err(ModelError::Format { path: path.to_path_buf(), tensor: None, offset: None, what });
    }
    refuse_lfs_pointer(path, &bytes)?;
    Ok(bytes)
}

/// A file's bytes. Cloning is cheap and shares them.
#[derive(Clone, Debug)]
pub struct ModelFile {
    /// Where it came from; for bytes that exist in no file as such, a description of what made them.
    pub path: PathBuf,
    /// Contents: a read-only mapping, or owned bytes.
    pub bytes: Bytes,
    /// True if `bytes` is a mapping of the whole file at `path`.
    pub mapped: bool,
}

struct Mapping(Arc<Mmap>);

impl AsRef<[u8]> for Mapping {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl ModelFile {
    /// Maps a file read-only.
    ///
    /// # Errors
    /// `Io` if it can't be mapped; `Format` if it is a Git LFS pointer.
    pub fn open(path: &Path) -> Result<ModelFile> {
        let io = |source| ModelError::Io { path: path.to_path_buf(), source };
        let file = File::open(path).map_err(io)?;
        if !file.metadata().map_err(io)?.is_file() {
            return Err(io(std::io::Error::other("not a regular file")));
        }
        // SAFETY: the mapping is read-only. As with every program that maps its model files, somebody who truncates
        // or rewrites the file while it is in use breaks the run; `docs/memory.md` says so.
        #[allow(unsafe_code)]
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        refuse_lfs_pointer(path, &map)?;
        Ok(ModelFile { path: path.to_path_buf(), bytes: Bytes::from_owner(Mapping(Arc::new(map))), mapped: true })
    }

    /// Bytes that are not a file of their own.
    pub fn owned(path: impl Into<PathBuf>, bytes: impl Into<Bytes>) -> ModelFile {
        ModelFile { path: path.into(), bytes: bytes.into(), mapped: false }
    }
}

/// A run of bytes that a tensor references.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Extent {
    /// Index into [`crate::ModelSpec::files`].
    pub file: usize,
    /// First byte.
    pub offset: usize,
    /// Number of bytes.
    pub len: usize,
}
