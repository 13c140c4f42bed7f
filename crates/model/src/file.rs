//! Model files in memory: read-only mappings, and the few bytes that exist in no file as such.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use memmap2::Mmap;

use crate::error::{ModelError, Result};

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
