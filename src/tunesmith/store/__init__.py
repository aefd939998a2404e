"""The only importer of SQLAlchemy: tables, the database, one module of functions per aggregate, events, migrations."""
