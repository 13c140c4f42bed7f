//! Files of external tensor data: named relative to the model, opened once, never outside its directory.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use super::Origin;
use crate::error::Result;
use crate::file::ModelFile;

/// Where the bytes of external data come from.
pub trait DataSource {
    /// The file named `location` by tensor `tensor`; `location` has passed [`check_location`].
    fn open(&mut self, location: &str, tensor: &str) -> Result<ModelFile>;
}

/// Refuses names that could lead out of the model's directory.
pub fn check_location(location: &str, tensor: &str, origin: &Origin<'_>) -> Result<()> {
    let refuse = |why: &str| Err(origin.format(Some(tensor), format!("external data location {location:?} {why}")));
    if location.is_empty() || location.contains('\0') {
        return refuse("is not a file name");
    }
    if location.contains(['\\', ':']) {
        return refuse("has a character that is no part of a portable relative name");
    }
    if !Path::new(location).components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir)) {
        return refuse("is absolute or leaves the model's directory");
    }
    Ok(())
}

/// The directory that a model lies in.
pub struct Directory {
    model: PathBuf,
    dir: PathBuf,
    open: HashMap<PathBuf, ModelFile>,
}

impl Directory {
    /// For the model at `model`, in `dir`.
    pub fn new(model: &Path, dir: &Path) -> Directory {
        Directory { model: model.to_path_buf(), dir: dir.to_path_buf(), open: HashMap::new() }
    }
}

impl DataSource for Directory {
    /// Symbolic links may point within the directory, or, where the model itself is a link (as in the cache of a
    /// download tool), within the directory that its target lies in.
    fn open(&mut self, location: &str, tensor: &str) -> Result<ModelFile> {
        let path = self.dir.join(location);
        let origin = Origin { path: &path };
        let real = path.canonicalize().map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => origin
                .format(Some(tensor), "the file that holds this tensor's data is missing; it belongs beside the model"),
            _ => origin.io(e),
        })?;
        if let Some(file) = self.open.get(&real) {
            return Ok(file.clone());
        }
        let home = self.dir.canonicalize().map_err(|e| origin.io(e))?;
        let target = self.model.canonicalize().map_err(|e| origin.io(e))?;
        let allowed = real.starts_with(&home) || target.parent().is_some_and(|p| real.parent() == Some(p));
        if !allowed {
            return Err(origin.format(
                Some(tensor),
                format!(
                    "external data is a link to {}, outside the model's directory; copy the file there",
                    real.display()
                ),
            ));
        }
        let file = ModelFile { path: path.clone(), ..ModelFile::open(&real)? };
        self.open.insert(real, file.clone());
        Ok(file)
    }
}
