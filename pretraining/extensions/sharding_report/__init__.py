"""A file that says how every parameter and moment is sharded."""

from pretraining.config.extension import Extension
from pretraining.extensions.sharding_report.report import check_file, watch
from pretraining.extensions.sharding_report.settings import ShardingReportConfig

EXTENSION = Extension(configuration=ShardingReportConfig, inputs=(check_file,), watch=watch)
