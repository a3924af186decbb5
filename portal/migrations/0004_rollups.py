import django.db.models.deletion
from django.db import migrations, models

TABLE = """
CREATE TABLE portal_rollup (
    step_s integer NOT NULL,
    node_id bigint NOT NULL,
    started_at bigint NOT NULL,
    payload bytea NOT NULL,
    PRIMARY KEY (step_s, node_id, started_at)
) PARTITION BY LIST (step_s);
CREATE TABLE portal_rollup_10 PARTITION OF portal_rollup FOR VALUES IN (10) PARTITION BY RANGE (started_at);
CREATE TABLE portal_rollup_60 PARTITION OF portal_rollup FOR VALUES IN (60) PARTITION BY RANGE (started_at);
CREATE TABLE portal_rollup_900 PARTITION OF portal_rollup FOR VALUES IN (900) PARTITION BY RANGE (started_at);
"""


class Migration(migrations.Migration):

    dependencies = [
        ('portal', '0003_order_times'),
    ]

    operations = [
        # Blocks have another layout from here on.
        migrations.RunSQL("DELETE FROM portal_sampleblock", migrations.RunSQL.noop),
        migrations.AddIndex(
            model_name='sampleblock',
            index=models.Index(fields=['started_at'], name='sample_block_age'),
        ),
        migrations.SeparateDatabaseAndState(
            database_operations=[migrations.RunSQL(TABLE, "DROP TABLE portal_rollup")],
            state_operations=[
                migrations.CreateModel(
                    name='Rollup',
                    fields=[
                        ('pk', models.CompositePrimaryKey('step_s', 'node_id', 'started_at', blank=True, editable=False, primary_key=True, serialize=False)),
                        ('step_s', models.PositiveIntegerField()),
                        ('started_at', models.BigIntegerField()),
                        ('payload', models.BinaryField()),
                        ('node', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='rollups', to='portal.node')),
                    ],
                ),
            ],
        ),
    ]
