// SPDX-License-Identifier: Apache-2.0

// Package metric names the metrics that Weft's daemons serve to Prometheus. The daemons register
// them by these names, and alerts and dashboards (cmd/internal/monitoring) are made of the same
// names, so neither can ask for what nobody serves. docs/monitoring.md explains each of them.
package metric

// Of the manager that leads: states of the cluster.
const (
	Volumes        = "weft_volumes"
	Drives         = "weft_drives"
	Nodes          = "weft_nodes"
	Attachments    = "weft_attachments"
	CapacityBytes  = "weft_capacity_bytes"
	AllocatedBytes = "weft_allocated_bytes"
	PromisedBytes  = "weft_promised_bytes"

	PoolCapacityBytes   = "weft_pool_capacity_bytes"
	PoolAllocatedBytes  = "weft_pool_allocated_bytes"
	DriveCapacityBytes  = "weft_drive_capacity_bytes"
	DriveAllocatedBytes = "weft_drive_allocated_bytes"
	DriveThinBytes      = "weft_drive_thin_bytes"
	VolumeUsedBytes     = "weft_volume_used_bytes"
	VolumeFull          = "weft_volume_full"

	Versions    = "weft_versions"
	Level       = "weft_level"
	NewestLevel = "weft_newest_level"
	BackupTime  = "weft_last_backup_timestamp_seconds"
)

// Of the manager that leads: what is not well, by name. What is well has none of these series.
const (
	VolumeCopiesLeft = "weft_volume_copies_left"
	RebuildLeftBytes = "weft_rebuild_left_bytes"
	ScrubOpenRanges  = "weft_scrub_open_ranges"
	ReadRepairs      = "weft_volume_read_repairs"
	ReadRepairsFail  = "weft_volume_read_repairs_failed"
	DriveProblem     = "weft_drive_problem"
	NodeOffline      = "weft_node_offline"
	AgentProblems    = "weft_agent_problems"
)

// Of each manager.
const (
	ManagerStreams        = "weft_volmgr_streams"
	ManagerLeads          = "weft_volmgr_leads"
	Managers              = "weft_volmgr_managers"
	ManagersToSpare       = "weft_volmgr_managers_to_spare"
	ManagerTerm           = "weft_volmgr_term"
	ManagerGeneration     = "weft_volmgr_generation"
	ManagerStepSeconds    = "weft_volmgr_step_seconds"
	ManagerCommitSeconds  = "weft_volmgr_commit_seconds"
	ManagerConfirmSeconds = "weft_volmgr_confirm_seconds"
	ManagerRefusedCalls   = "weft_volmgr_refused_calls_total"
)

// Of each daemon with a server.
const (
	GRPCCalls             = "weft_grpc_calls_total"
	GRPCCallSeconds       = "weft_grpc_call_seconds"
	GRPCHandshakesRefused = "weft_grpc_handshakes_refused_total"
)

// Of each daemon that proves who it is.
const CertificateExpiry = "weft_certificate_expiry_timestamp_seconds"

// Of the initiator agent.
const (
	InitiatorAttachments    = "weft_initiator_attachments"
	InitiatorLegs           = "weft_initiator_legs"
	InitiatorLegLosses      = "weft_initiator_leg_losses_total"
	InitiatorLastStall      = "weft_initiator_last_stall_seconds"
	InitiatorResyncBytes    = "weft_initiator_resync_bytes_total"
	InitiatorManagerRefused = "weft_initiator_manager_refused"
	VolumeIOs               = "weft_volume_ios_total"
	VolumeBytes             = "weft_volume_bytes_total"
	VolumeErrors            = "weft_volume_errors_total"
	VolumeIOSeconds         = "weft_volume_io_seconds"
	VolumeHeldSeconds       = "weft_volume_held_seconds_total"
	LegIOSeconds            = "weft_leg_io_seconds"
)

// Of the target agent.
const (
	DriveIOs                 = "weft_drive_ios_total"
	DriveBytes               = "weft_drive_bytes_total"
	DriveIOTimeSeconds       = "weft_drive_io_time_seconds_total"
	DriveIOSeconds           = "weft_drive_io_seconds"
	LegBytes                 = "weft_leg_bytes_total"
	TargetRefusedHosts       = "weft_target_refused_hosts_total"
	DriveMeanIOSeconds       = "weft_target_drive_io_seconds"
	DriveCriticalWarning     = "weft_target_drive_critical_warning"
	DriveTemperature         = "weft_target_drive_temperature_celsius"
	DriveSpareRatio          = "weft_target_drive_spare_ratio"
	DriveSpareThresholdRatio = "weft_target_drive_spare_threshold_ratio"
	DriveUsedRatio           = "weft_target_drive_used_ratio"
	DriveReadBytes           = "weft_target_drive_read_bytes_total"
	DriveWrittenBytes        = "weft_target_drive_written_bytes_total"
	DriveUnsafeShutdowns     = "weft_target_drive_unsafe_shutdowns_total"
	DriveMediaErrors         = "weft_target_drive_media_errors_total"
	DriveErrorEntries        = "weft_target_drive_error_entries_total"
)

// Of the CSI driver. The first is of csi-lib-utils, for which dashboards exist.
const (
	CSIOperationSeconds = "csi_plugin_operations_seconds"
	CSIStepSeconds      = "weft_csi_node_step_seconds"
)
