//! Models in several files.

use std::path::{Path, PathBuf};

use headrace_model::gguf::load;

use crate::writer::{Gguf, Kind, Val, expect};

struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let path = std::env::temp_dir().join(format!("headrace-gguf-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Dir(path)
    }

    fn shard(&self, no: usize) -> PathBuf {
        self.0.join(format!("m-{:05}-of-00003.gguf", no + 1))
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The tiny model in three shards; the first has metadata only.
fn shards() -> [Gguf; 3] {
    let mut first = Gguf::tiny("llama");
    let tensors = std::mem::take(&mut first.tensors);
    let mut shards = [first, Gguf::empty(), Gguf::empty()];
    for (i, t) in tensors.into_iter().enumerate() {
        shards[1 + i % 2].tensors.push(t);
    }
    for (no, g) in shards.iter_mut().enumerate() {
        g.set("split.no", Val::U16(no as u16)).set("split.count", Val::U16(3)).set("split.tensors.count", Val::I32(11));
    }
    shards
}

fn write(dir: &Dir, shards: &[Gguf]) {
    for (no, g) in shards.iter().enumerate() {
        std::fs::write(dir.shard(no), g.build()).unwrap();
    }
}

#[test]
fn any_shard_opens_the_model() {
    let dir = Dir::new("any");
    write(&dir, &shards());
    let whole = Gguf::tiny("llama").load().unwrap();
    for no in 0..3 {
        let m = load(&dir.shard(no)).unwrap();
        assert_eq!(m.spec.files.len(), 2, "the first shard holds no tensor");
        assert!(m.spec.files.iter().all(|f| f.mapped));
        for (a, b) in m.spec.tensors.iter().zip(&whole.spec.tensors) {
            assert_eq!(a.name, b.name);
            let bytes = |s: &headrace_model::ModelSpec, t: &headrace_model::spec::Tensor| {
                s.extent(t.planes[0].unwrap()).to_vec()
            };
            assert_eq!(bytes(&m.spec, a), bytes(&whole.spec, b), "{}", a.name);
        }
    }
}

#[test]
fn shards_that_do_not_belong_together() {
    let check = |name: &str, kind: Kind, parts: &[&str], change: &dyn Fn(&mut [Gguf; 3])| {
        let dir = Dir::new(name);
        let mut files = shards();
        change(&mut files);
        write(&dir, &files);
        expect(load(&dir.shard(0)), kind, parts);
    };
    check("count", Kind::Format, &["00002-of-00003", "split.count", "4 shards"], &|s| {
        s[1].set("split.count", Val::U16(4));
    });
    check("no", Kind::Format, &["00003-of-00003", "split.no", "is 1"], &|s| {
        s[2].set("split.no", Val::U16(1));
    });
    check("nomissing", Kind::Format, &["00003-of-00003", "split.no", "missing"], &|s| {
        s[2].unset("split.no");
    });
    check("range", Kind::Format, &["split.no", "not below"], &|s| {
        s[0].set("split.no", Val::U16(3));
    });
    check("zero", Kind::Format, &["split.count", "0 shards"], &|s| {
        s[0].set("split.count", Val::U16(0));
    });
    check("total", Kind::Format, &["split.tensors.count", "13 tensors", "hold 11"], &|s| {
        s[0].set("split.tensors.count", Val::I32(13));
    });
    check("arch", Kind::Format, &["00002-of-00003", "general.architecture", "differs"], &|s| {
        s[1].set("general.architecture", Val::Str("qwen2"));
    });
    check("twice", Kind::Format, &["00003-of-00003", "two shards"], &|s| {
        let t = s[1].tensors[0].clone();
        *s[2].tensors.last_mut().unwrap() = t;
    });
    check("unused", Kind::Unsupported, &["00003-of-00003", "stray.weight"], &|s| {
        s[2].f32("stray.weight", 3);
        s.iter_mut().for_each(|g| {
            g.set("split.tensors.count", Val::I32(12));
        });
    });
}

#[test]
fn a_missing_or_misnamed_shard() {
    let dir = Dir::new("missing");
    write(&dir, &shards());
    std::fs::remove_file(dir.shard(1)).unwrap();
    expect(load(&dir.shard(0)), Kind::Format, &["m-00002-of-00003.gguf", "missing", "3 shards"]);
    std::fs::rename(dir.shard(0), dir.0.join("other.gguf")).unwrap();
    expect(load(&dir.0.join("other.gguf")), Kind::Format, &["other.gguf", "-00001-of-00003.gguf"]);
}

#[test]
fn not_a_file() {
    let dir = Dir::new("io");
    expect(load(&dir.0), Kind::Io, &["not a regular file"]);
    expect(load(Path::new("/nonexistent/x.gguf")), Kind::Io, &["/nonexistent/x.gguf"]);
    std::fs::write(dir.0.join("empty.gguf"), b"").unwrap();
    expect(load(&dir.0.join("empty.gguf")), Kind::Format, &["empty.gguf", "0 bytes"]);
}
