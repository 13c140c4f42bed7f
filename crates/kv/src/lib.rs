//! KV pages: geometry, layouts, page tables, the store trait, growth.
